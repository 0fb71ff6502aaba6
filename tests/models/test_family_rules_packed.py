"""Row rules of the families with packed patches: which rule each layer obeys, adapters mixed in one encoder batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from polylens.config import EngineConfig
from polylens.models.loading import load_model
from polylens.models.probe import CONTRAST_FACTOR
from polylens.models.probe_model import find_row_rules
from polylens.models.row_rules import RowRule

PATCHES: Mapping[str, RowRule] = {"": RowRule.PATCHES}
TINY_PICTURES = RowRule.TILES
"""Of towers that take every patch as a picture of its own, (patches, 3, side, side)."""
EXPECTED: Mapping[str, Mapping[str, RowRule]] = {
    "cohere_compass": PATCHES,
    "ernie4_5_vl_moe": PATCHES,
    "fuyu": PATCHES,
    "glm4v": PATCHES,
    "glm46v": PATCHES,
    "glm4v_moe": PATCHES,
    "glm_ocr": PATCHES,
    "hyperclovax_vision_v2": PATCHES,
    "kimi_k25": {"mm_projector": RowRule.TOKENS, "": TINY_PICTURES},
    "paddleocr_vl": {"projector": RowRule.PER_CALL, "": TINY_PICTURES},
    "qwen3_5": PATCHES,
    "qwen3_5_moe": PATCHES,
    "qwen3_vl_moe": PATCHES,
    "video_llama_3": PATCHES,
}
"""By family: the rule of the layers whose names match a pattern; the first that matches counts."""


@pytest.mark.parametrize("family", EXPECTED)
def test_every_layer_has_its_rule(family: str, checkpoint: Callable[[str], Path]) -> None:
    result = find_row_rules(load_model(checkpoint(family), EngineConfig()))
    assert result.rules == {name: _rule_of(name, EXPECTED[family]) for name in result.rules}
    assert all(any(re.search(pattern, name) for name in result.rules) for pattern in EXPECTED[family])
    assert result.mixed
    assert not result.reasons
    assert not result.unreachable
    assert result.contrast >= CONTRAST_FACTOR


def _rule_of(layer: str, rules: Mapping[str, RowRule]) -> RowRule:
    return next(rule for pattern, rule in rules.items() if re.search(pattern, layer))
