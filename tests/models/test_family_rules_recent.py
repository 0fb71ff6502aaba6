"""Row rules of the families in `recent`: which layer goes by what, adapters mixed in one encoder batch."""

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
from tests.models.test_probe_model import deepened

RULES: Mapping[str, Mapping[str, RowRule]] = {
    "gemma3n": {r"audio": RowRule.NO_EFFECT, "": RowRule.TILES},
    "gemma4_unified": {r"audio": RowRule.NO_EFFECT, "": RowRule.TILES},
    "mistral3_mistral4": {r"patch_conv$": RowRule.IMAGES, "": RowRule.PATCHES},
    "molmo2": {r"multi_modal_projector": RowRule.TOKENS, "": RowRule.PATCHES},
    "paligemma2": {"": RowRule.TILES},
}
"""By family: layers whose name matches (`re.search`) go by the rule; the first pattern that matches counts."""


@pytest.mark.parametrize("family", RULES)
def test_layers_get_their_rules(family: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    result = find_row_rules(load_model(checkpoint(family), EngineConfig()), cache_dir=tmp_path)
    expected = {
        name: next(rule for pattern, rule in RULES[family].items() if re.search(pattern, name)) for name in result.rules
    }
    assert result.rules == expected
    assert {*result.rules.values()} == {*RULES[family].values()}
    assert not result.reasons
    assert not result.unreachable
    assert result.mixed
    assert result.contrast >= CONTRAST_FACTOR


def test_a_tower_whose_levels_another_config_names_is_cut(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    big = deepened(load_model(checkpoint("molmo2"), EngineConfig()), 9)
    cut = find_row_rules(big, cache_dir=tmp_path / "cut", max_parameters=0)
    assert cut.rules == find_row_rules(big, cache_dir=tmp_path / "whole").rules
