"""Row rules of every family that runs in mixed batches: which layers go by what."""

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

Rules = Mapping[str, RowRule]

PATCHES: Rules = {"": RowRule.PATCHES}
TILES: Rules = {"": RowRule.TILES}
VIEWS: Rules = {"": RowRule.VIEWS}
TINY_PICTURES: Rules = TILES
"""Of towers that take every patch as a picture of its own, (patches, 3, side, side)."""
PIXTRAL: Rules = {r"patch_conv$": RowRule.IMAGES, **PATCHES}
GEMMA4: Rules = {"embed_vision": RowRule.PATCHES, **TILES}
MINICPM: Rules = {r"^model\.merger": RowRule.PER_TILE}
CHANNELS_FIRST: Rules = {r"neck\.layer_norm": RowRule.UNPROVEN}
"""Norms over the channels of a picture, which take no delta."""


def without_effect(pattern: str) -> Rules:
    """Layers whose output never reaches the features."""
    return {pattern: RowRule.NO_EFFECT}


WITH_SOUNDS: Rules = without_effect("audio")

RULES: Mapping[str, Rules] = {
    # packed patches
    "cohere_compass": PATCHES,
    "cosmos3_edge": PATCHES,
    "cosmos3_omni": PATCHES,
    "ernie4_5_vl_moe": PATCHES,
    "exaone4_5": PATCHES,
    "fuyu": PATCHES,
    "glm4v": PATCHES,
    "glm46v": PATCHES,
    "glm4v_moe": PATCHES,
    "glm_ocr": PATCHES,
    "glmga": PATCHES,
    "hunyuan_vl": {"patch_merger": RowRule.PER_TILE, **PATCHES},  # called once a picture, which is one tile
    "hyperclovax_vision_v2": PATCHES,
    "kimi_k25": {"mm_projector": RowRule.TOKENS, **TINY_PICTURES},
    "lfm3_vl": PATCHES,
    "muse_glimmer": PATCHES,
    "muse_spark": {**WITH_SOUNDS, **PATCHES},
    "paddleocr_vl": {"projector": RowRule.PER_CALL, **TINY_PICTURES},
    "qwen2_vl": PATCHES,
    "qwen2_5_vl": PATCHES,
    "qwen2_5_omni_thinker": {**WITH_SOUNDS, **PATCHES},
    "qwen3_5": PATCHES,
    "qwen3_5_moe": PATCHES,
    "qwen3_omni_moe_thinker": {**WITH_SOUNDS, **PATCHES},
    "qwen3_vl": PATCHES,
    "qwen3_vl_moe": PATCHES,
    "step3p7": VIEWS,
    "video_llama_3": PATCHES,
    # padded pictures
    "gemma4": GEMMA4,
    "gemma4_large": GEMMA4,
    "idefics2": TILES,
    "idefics3": TILES,
    "lfm2_vl": {**without_effect(r"vision_tower\.head\."), **TILES},
    "lighton_ocr": PIXTRAL,
    "llava_pixtral": PIXTRAL,
    "minicpm_ocr": {**MINICPM, **without_effect("vit_merger"), **PATCHES},
    "minicpmv4_6": {**MINICPM, **PATCHES},
    "minicpmv4_7": {**MINICPM, **PATCHES},
    "mistral3": PIXTRAL,
    "smolvlm": TILES,
    # recent ones
    "gemma3n": {**WITH_SOUNDS, **TILES},
    "gemma4_unified": {**WITH_SOUNDS, **TILES},
    "mistral3_mistral4": PIXTRAL,
    "molmo2": {"multi_modal_projector": RowRule.TOKENS, **PATCHES},
    "paligemma2": TILES,
    # squares
    "aria": {
        r"multihead_attn\.out_proj": RowRule.UNPROVEN,  # its weight is read without a call
        **without_effect("post_layernorm"),
        **TILES,
    },
    "deepseek_vl": TILES,
    "deepseek_vl_hybrid": {**CHANNELS_FIRST, **TILES},
    "fast_vlm": TILES,
    "granite_docling": {**without_effect("connector.fine|density_router"), **TILES},
    "janus": {**without_effect("vqmodel|generation_"), **TILES},
    "perception_lm": TILES,
    "pp_chart2table": {**CHANNELS_FIRST, **TILES},
    "qianfan_ocr": TILES,
    "unlimited_ocr": {**CHANNELS_FIRST, **VIEWS},
    # tiles
    "gemma3": TILES,
    "llava": {**without_effect(r"\.layers\.2\.|post_layernorm"), **TILES},
    "internvl": TILES,
    "paligemma": TILES,
    "llava_next": {**without_effect(r"\.layers\.2\.|post_layernorm"), **TILES},
    "llava_next_granite": {**without_effect("post_layernorm"), **TILES},
    "llava_next_video": {**without_effect(r"\.layers\.2\.|post_layernorm"), **TILES},
    "llava_onevision": {**without_effect("post_layernorm"), **TILES},
    "granite4_vision": {**without_effect("post_layernorm"), **TILES},
    "aya_vision": {**without_effect("post_layernorm"), **TILES},
    "cohere2_vision": {**without_effect("vision_tower.head"), **TILES},
    "ovis2": TILES,
    "got_ocr2": {**CHANNELS_FIRST, **TILES},
    "llama4": TILES,
    "deepseek_ocr2": {**CHANNELS_FIRST, **VIEWS},
    "video_llava": {**without_effect(r"\.layers\.2\.|post_layernorm"), **TILES},
    "vipllava": {**without_effect(r"\.layers\.3\.|post_layernorm"), **TILES},
    "blip-2": TILES,
    "instructblip": {**without_effect(r"qformer\.encoder\.layer\.1\.(?:intermediate|output)\."), **TILES},
    "instructblipvideo": {**without_effect(r"qformer\.encoder\.layer\.1\.(?:intermediate|output)\."), **TILES},
    "kosmos-2": TILES,
}
"""By family: the rule of the layers whose names match a pattern (`re.search`); the first that matches counts."""

FULL = frozenset(
    {
        "cosmos3_edge",
        "cosmos3_omni",
        "exaone4_5",
        "glmga",
        "lfm3_vl",
        "muse_glimmer",
        "qwen2_5_omni_thinker",
        "qwen3_omni_moe_thinker",
    }
)
"""Each like one of those in CI; the mixed batches of tests/parity would show a wrong rule."""


@pytest.mark.parametrize("family", [pytest.param(name, marks=[pytest.mark.full] * (name in FULL)) for name in RULES])
def test_every_layer_has_its_rule(family: str, checkpoint: Callable[[str], Path]) -> None:
    result = find_row_rules(load_model(checkpoint(family), EngineConfig()))
    rules = RULES[family]
    patterns = {layer: next(one for one in rules if re.search(one, layer)) for layer in result.rules}
    assert result.rules == {layer: rules[pattern] for layer, pattern in patterns.items()}
    assert {*patterns.values()} == rules.keys()
    assert {*result.unreachable} == {*result.reasons} == {*result.layers_with(RowRule.UNPROVEN)}
    assert result.mixed
    assert result.contrast >= CONTRAST_FACTOR


def test_a_weight_that_other_code_reads_is_refused_on_the_host_path_too(checkpoint: Callable[[str], Path]) -> None:
    hosted = load_model(checkpoint("aria"), EngineConfig()).hosted("it is a test")
    assert find_row_rules(hosted).unreachable == ("model.multi_modal_projector.cross_attn.multihead_attn.out_proj",)
