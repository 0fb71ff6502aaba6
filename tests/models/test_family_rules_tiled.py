"""Row rules of the families with tiles: one rule for each layer, adapters mixed in one encoder batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polylens.config import EngineConfig
from polylens.models.loading import load_model
from polylens.models.probe import CONTRAST_FACTOR
from polylens.models.probe_copy import copy_for_probe
from polylens.models.probe_model import find_row_rules
from polylens.models.row_rules import RowRule
from tests.models.test_probe_model import deepened

WITHOUT_EFFECT = {
    "internvl": None,
    "paligemma": None,
    "llava_next": r"\.layers\.2\.|post_layernorm",
    "llava_next_granite": r"post_layernorm",
    "llava_next_video": r"\.layers\.2\.|post_layernorm",
    "llava_onevision": r"post_layernorm",
    "granite4_vision": r"post_layernorm",
    "aya_vision": r"post_layernorm",
    "cohere2_vision": r"vision_tower.head",
    "ovis2": None,
    "got_ocr2": None,
    "llama4": None,
    "deepseek_ocr2": None,
    "video_llava": r"\.layers\.2\.|post_layernorm",
    "vipllava": r"\.layers\.3\.|post_layernorm",
    "blip-2": None,
    "instructblip": r"qformer\.encoder\.layer\.1\.(?:intermediate|output)\.",
    "instructblipvideo": r"qformer\.encoder\.layer\.1\.(?:intermediate|output)\.",
    "kosmos-2": None,
}
"""By family: a pattern of the layers whose output never reaches the features; all others go by tiles."""

UNREACHABLE = {"got_ocr2": r"neck.layer_norm", "deepseek_ocr2": r"neck.layer_norm"}
"""Norms over the channels of a picture (channels first), which take no delta: adapters with one are refused."""


RULE = {"deepseek_ocr2": RowRule.VIEWS}


@pytest.mark.parametrize("family", WITHOUT_EFFECT)
def test_every_layer_goes_by_tiles(family: str, checkpoint: Callable[[str], Path]) -> None:
    result = find_row_rules(load_model(checkpoint(family), EngineConfig()))
    pattern = WITHOUT_EFFECT[family]
    idle = {name for name in result.rules if pattern and re.search(pattern, name)}
    assert {name for name, rule in result.rules.items() if rule is RowRule.NO_EFFECT} == idle
    unreachable = {name for name in result.rules if re.search(UNREACHABLE.get(family, "$^"), name)}
    assert {*result.unreachable} == {*result.reasons} == unreachable
    assert {rule for name, rule in result.rules.items() if name not in idle | unreachable} == {
        RULE.get(family, RowRule.TILES)
    }
    assert result.mixed
    assert result.contrast >= CONTRAST_FACTOR


CUTS = [
    ("internvl", {}, (0, 5)),
    ("llava_next_granite", {"vision_feature_layer": [-4, -2, -1]}, (0, 2, 3, 4, 5)),
    ("granite4_vision", {"deepstack_layer_map": [[-4, 4]], "spatial_vision_layer": -1}, (0, 2, 3, 5)),
    ("ovis2", {}, (0, 5)),
    ("got_ocr2", {"global_attn_indexes": [2, 5]}, (0, 2, 5)),
    ("llama4", {}, (0, 5)),
]
"""(family, settings of a tower of six blocks, the blocks that its cut copy has)."""


@pytest.mark.parametrize(("family", "settings", "kept"), CUTS)
def test_a_cut_copy_has_the_blocks_that_differ(
    family: str, settings: dict[str, Any], kept: tuple[int, ...], checkpoint: Callable[[str], Path]
) -> None:
    big = deepened(load_model(checkpoint(family), EngineConfig()), 6, **settings)
    assert copy_for_probe(big.model, big.layers, max_parameters=0).kept == kept


@pytest.mark.full  # in CI: the families of `test_probe_model`
@pytest.mark.parametrize(("family", "settings"), [cut[:2] for cut in CUTS])
def test_a_cut_copy_gives_the_rules_of_the_whole(
    family: str, settings: dict[str, Any], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    big = deepened(load_model(checkpoint(family), EngineConfig()), 6, **settings)
    cut = find_row_rules(big, cache_dir=tmp_path / "cut", max_parameters=0)
    assert cut.rules == find_row_rules(big, cache_dir=tmp_path / "whole").rules
    assert cut.mixed
