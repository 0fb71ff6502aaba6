"""The cut copies of towers with blocks that differ: which blocks stay, and that they give the rules of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polylens.models.probe_copy import copy_for_probe
from polylens.models.probe_model import find_row_rules
from tests.models.test_probe_model import LoadedOf, deepened

CUTS = [
    ("qwen2_vl", 9, {}, (0, 8)),
    ("qwen2_5_vl", 9, {"fullatt_block_indexes": [2, 4, 6, 8]}, (0, 2, 8)),
    ("qwen3_vl", 9, {"deepstack_visual_indexes": [1, 3, 5]}, (0, 1, 3, 5, 8)),
    ("gemma3", 6, {}, (0, 5)),
    ("llava", 6, {}, (0, 4, 5)),
    ("llava", 7, {"vision_feature_layer": -3}, (0, 4, 5, 6)),
    ("llava", 7, {"vision_feature_layer": 3}, (0, 2, 3, 6)),
    ("llava", 7, {"vision_feature_layer": [2, -2]}, (0, 1, 2, 5, 6)),
    ("internvl", 6, {}, (0, 5)),
    ("llava_next_granite", 6, {"vision_feature_layer": [-4, -2, -1]}, (0, 2, 3, 4, 5)),
    ("granite4_vision", 6, {"deepstack_layer_map": [[-4, 4]], "spatial_vision_layer": -1}, (0, 2, 3, 5)),
    ("ovis2", 6, {}, (0, 5)),
    ("got_ocr2", 6, {"global_attn_indexes": [2, 5]}, (0, 2, 5)),
    ("llama4", 6, {}, (0, 5)),
    ("minicpmv4_6", 7, {}, (0, 1, 2, 6)),  # a merger amid the tower
    ("molmo2", 9, {}, (0, 1, 2, 3, 8)),  # another config names its levels
]
"""(family, blocks of its tower, settings of it, the blocks that its cut copy has)."""
IN_CI = (CUTS[1], CUTS[3], CUTS[5], CUTS[7], CUTS[-1])
"""Windows and full attention, a fixed size, features before the last layer and of several layers."""


@pytest.mark.parametrize(("family", "num_blocks", "settings", "kept"), CUTS)
def test_a_cut_copy_has_the_blocks_that_differ(
    family: str,
    num_blocks: int,
    settings: dict[str, Any],
    kept: tuple[int, ...],
    loaded_of: LoadedOf,
) -> None:
    big = deepened(loaded_of(family), num_blocks, **settings)
    assert copy_for_probe(big.model, big.layers, max_parameters=0).kept == kept


@pytest.mark.parametrize(
    ("family", "num_blocks", "settings"),
    [pytest.param(*cut[:3], marks=() if cut in IN_CI else pytest.mark.full) for cut in CUTS],
)
def test_a_cut_copy_gives_the_rules_of_the_whole(
    family: str, num_blocks: int, settings: dict[str, Any], loaded_of: LoadedOf, tmp_path: Path
) -> None:
    big = deepened(loaded_of(family), num_blocks, **settings)
    cut = find_row_rules(big, cache_dir=tmp_path / "cut", max_parameters=0)
    assert cut.rules == find_row_rules(big, cache_dir=tmp_path / "whole").rules
    assert cut.mixed
