"""Row rules of the families whose tower takes squares: one rule a layer, adapters mixed in one encoder batch."""

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

WITHOUT_EFFECT: Mapping[str, str | None] = {
    "aria": "post_layernorm",
    "deepseek_vl": None,
    "deepseek_vl_hybrid": None,
    "fast_vlm": None,
    "granite_docling": "connector.fine|density_router",
    "janus": "vqmodel|generation_",
    "perception_lm": None,
    "pp_chart2table": None,
    "qianfan_ocr": None,
    "unlimited_ocr": None,
}
"""By family: a pattern of the layers whose output never reaches the features; all others go by tiles."""

UNREACHABLE = {
    "aria": r"multihead_attn\.out_proj",
    "deepseek_vl_hybrid": r"neck\.layer_norm",
    "pp_chart2table": r"neck\.layer_norm",
    "unlimited_ocr": r"neck\.layer_norm",
}
"""Layers whose weight is read without calling them, and norms over channels: adapters with one are refused."""

RULE = {"unlimited_ocr": RowRule.VIEWS}


@pytest.mark.parametrize("family", WITHOUT_EFFECT)
def test_every_layer_goes_by_tiles(family: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    result = find_row_rules(load_model(checkpoint(family), EngineConfig()), cache_dir=tmp_path)
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


def test_a_weight_that_other_code_reads_is_refused_on_the_host_path_too(checkpoint: Callable[[str], Path]) -> None:
    hosted = load_model(checkpoint("aria"), EngineConfig()).hosted("it is a test")
    assert find_row_rules(hosted).unreachable == ("model.multi_modal_projector.cross_attn.multihead_attn.out_proj",)
