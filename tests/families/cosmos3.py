"""Cosmos 3's reasoners: Omni is Qwen3-VL under another name, Edge has a SigLIP 2 tower and its own text model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import (
    Cosmos3EdgeConfig,
    Cosmos3EdgeForConditionalGeneration,
    Cosmos3EdgeImageProcessor,
    Cosmos3EdgeProcessor,
    Cosmos3EdgeVideoProcessor,
    Cosmos3OmniConfig,
    Cosmos3OmniForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.packed import DEEPSTACK, PACKED, QWEN3_TEXT, QWEN3_VISION, QWEN_STOP
from tests.families.recipes import MAX_PIXELS, MERGE, PATCH, Family, mrope, qwen_ids, text_config
from tests.families.tokenizers_and_templates import QWEN3_TEMPLATE, qwen_tokenizer


def _omni(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = Cosmos3OmniConfig(
        text_config=text_config(tokenizer, "<|im_end|>", model_type="qwen3_vl_text", **QWEN3_TEXT),
        vision_config={**QWEN3_VISION, **DEEPSTACK},
        **qwen_ids(tokenizer),
    )
    return Cosmos3OmniForConditionalGeneration(config)


def _edge(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": PATCH,
        "num_patches": 16,  # positions of 4 x 4 patches, interpolated for other sizes
        "spatial_merge_size": MERGE,
    }
    config = Cosmos3EdgeConfig(
        text_config=text_config(tokenizer, "<|im_end|>", head_dim=8, rope_parameters=mrope(2, 1, 1)),
        vision_config=vision,
        projector_hidden_size=48,
        **qwen_ids(tokenizer),
    )
    return Cosmos3EdgeForConditionalGeneration(config)


def _edge_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    common: dict[str, Any] = {"patch_size": PATCH, "merge_size": MERGE}
    least = (PATCH * MERGE) ** 2
    return Cosmos3EdgeProcessor(
        image_processor=Cosmos3EdgeImageProcessor(size={"shortest_edge": least, "longest_edge": MAX_PIXELS}, **common),
        tokenizer=tokenizer,
        video_processor=Cosmos3EdgeVideoProcessor(
            size={"shortest_edge": least, "longest_edge": 16 * MAX_PIXELS}, **common
        ),
        chat_template=QWEN3_TEMPLATE,
    )


COSMOS3: Mapping[str, Family] = {
    "cosmos3_omni": Family(qwen_tokenizer, PACKED["qwen3_vl"].make_processor, _omni, QWEN_STOP, takes_videos=True),
    "cosmos3_edge": Family(qwen_tokenizer, _edge_processor, _edge, QWEN_STOP, takes_videos=True),
}
