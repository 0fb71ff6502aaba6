"""Row rules of the newer families: which rule each layer obeys, adapters mixed in one encoder batch."""

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
WITH_SOUNDS: Mapping[str, RowRule] = {"audio_tower": RowRule.NO_EFFECT, "": RowRule.PATCHES}
EXPECTED: Mapping[str, Mapping[str, RowRule]] = {
    "cosmos3_edge": PATCHES,
    "cosmos3_omni": PATCHES,
    "exaone4_5": PATCHES,
    "glmga": PATCHES,
    # once for each picture, which is one tile
    "hunyuan_vl": {"patch_merger": RowRule.PER_TILE, "": RowRule.PATCHES},
    "lfm3_vl": PATCHES,
    "muse_glimmer": PATCHES,
    "muse_spark": WITH_SOUNDS,
    "qwen2_5_omni_thinker": WITH_SOUNDS,
    "qwen3_omni_moe_thinker": WITH_SOUNDS,
    "step3p7": {"": RowRule.VIEWS},
}
"""By family: the rule of the layers whose names match a pattern; the first that matches counts."""

IN_CI = ("hunyuan_vl", "muse_spark", "step3p7")
"""One of each kind; the mixed batches of tests/parity would show a wrong rule of the others."""
FAMILIES = [pytest.param(name, marks=() if name in IN_CI else pytest.mark.full) for name in EXPECTED]


@pytest.mark.parametrize("family", FAMILIES)
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
