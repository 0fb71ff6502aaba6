"""Row rules of the families that pad pictures: which layer goes by what, adapters mixed in one encoder batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from polylens import LLM
from polylens.config import EngineConfig
from polylens.models.loading import load_model
from polylens.models.probe import CONTRAST_FACTOR
from polylens.models.probe_copy import copy_for_probe
from polylens.models.probe_model import find_row_rules
from polylens.models.row_rules import RowRule
from tests.models.test_probe_model import deepened

GEMMA4 = {r"embed_vision": RowRule.PATCHES, "": RowRule.TILES}
TILED = {"": RowRule.TILES}
PIXTRAL = {r"patch_conv$": RowRule.IMAGES, "": RowRule.PATCHES}
MINICPM = {r"^model\.merger": RowRule.PER_TILE}

RULES: Mapping[str, Mapping[str, RowRule]] = {
    "gemma4": GEMMA4,
    "gemma4_large": GEMMA4,
    "idefics2": TILED,
    "idefics3": TILED,
    "lfm2_vl": {r"vision_tower\.head\.": RowRule.NO_EFFECT, "": RowRule.TILES},
    "lighton_ocr": PIXTRAL,
    "llava_pixtral": PIXTRAL,
    "minicpm_ocr": {**MINICPM, r"vit_merger": RowRule.NO_EFFECT, "": RowRule.PATCHES},
    "minicpmv4_6": {**MINICPM, "": RowRule.PATCHES},
    "minicpmv4_7": {**MINICPM, "": RowRule.PATCHES},
    "mistral3": PIXTRAL,
    "smolvlm": TILED,
}
"""By family: layers whose name matches (`re.search`) go by the rule; the first pattern that matches counts."""


@pytest.mark.parametrize("family", RULES)
def test_layers_get_their_rules(family: str, checkpoint: Callable[[str], Path]) -> None:
    result = find_row_rules(load_model(checkpoint(family), EngineConfig()))
    assert result.rules == {name: _expected(family, name) for name in result.rules}
    assert {*result.rules.values()} == {*RULES[family].values()}
    assert set(result.reasons) == set(result.layers_with(RowRule.UNPROVEN))
    assert not result.unreachable
    assert result.contrast >= CONTRAST_FACTOR


@pytest.mark.parametrize("family", RULES)
def test_adapters_are_mixed(family: str, checkpoint: Callable[[str], Path]) -> None:
    with LLM(checkpoint(family)) as llm:
        assert llm.engine.vision.mixed


def test_a_merger_amid_the_tower_stays_in_a_cut_copy(checkpoint: Callable[[str], Path]) -> None:
    loaded = load_model(checkpoint("minicpmv4_6"), EngineConfig())
    big = deepened(loaded, 7)
    assert copy_for_probe(big.model, big.layers, max_parameters=0).kept == (0, 1, 2, 6)


@pytest.mark.full
def test_a_cut_copy_with_a_merger_gives_the_rules_of_the_whole(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    big = deepened(load_model(checkpoint("minicpmv4_6"), EngineConfig()), 7)
    cut = find_row_rules(big, cache_dir=tmp_path / "cut", max_parameters=0)
    assert cut.rules == find_row_rules(big, cache_dir=tmp_path / "whole").rules
    assert RowRule.NO_EFFECT not in cut.rules.values()


def _expected(family: str, layer: str) -> RowRule:
    return next(rule for pattern, rule in RULES[family].items() if re.search(pattern, layer))
