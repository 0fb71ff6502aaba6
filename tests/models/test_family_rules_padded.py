"""Row rules of the families that pad pictures: which layer goes by what, adapters mixed in one encoder batch."""

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

GEMMA4 = {r"embed_vision": RowRule.PATCHES, "": RowRule.TILES}
TILED = {"": RowRule.TILES}
PIXTRAL = {r"patch_conv$": RowRule.IMAGES, "": RowRule.PATCHES}

RULES: Mapping[str, Mapping[str, RowRule]] = {
    "gemma4": GEMMA4,
    "gemma4_large": GEMMA4,
    "idefics2": TILED,
    "idefics3": TILED,
    "lfm2_vl": {r"vision_tower\.head\.": RowRule.NO_EFFECT, "": RowRule.TILES},
    "lighton_ocr": PIXTRAL,
    "llava_pixtral": PIXTRAL,
    "mistral3": PIXTRAL,
    "smolvlm": TILED,
}
"""By family: layers whose name matches (`re.search`) go by the rule; the first pattern that matches counts."""


@pytest.mark.parametrize("family", RULES)
def test_layers_get_their_rules(family: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    result = find_row_rules(load_model(checkpoint(family), EngineConfig()), cache_dir=tmp_path)
    assert not result.reasons
    assert result.rules == {name: _expected(family, name) for name in result.rules}
    assert {*result.rules.values()} == {*RULES[family].values()}
    assert result.mixed
    assert not result.unreachable
    assert result.contrast >= CONTRAST_FACTOR


def _expected(family: str, layer: str) -> RowRule:
    return next(rule for pattern, rule in RULES[family].items() if re.search(pattern, layer))
