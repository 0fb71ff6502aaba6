"""Cosmos 3's reasoners: Omni is Qwen3-VL under another name, Edge has a SigLIP 2 tower and its own text model."""

from __future__ import annotations

from collections.abc import Mapping

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
from tests.families.recipes import MERGE, PATCH, SMALL_TOWER, Family, mrope, packed_media, qwen_ids, text_config
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
        **SMALL_TOWER,
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
    return Cosmos3EdgeProcessor(
        **packed_media(Cosmos3EdgeImageProcessor, Cosmos3EdgeVideoProcessor, num_frames=16, temporal_patch_size=1),
        tokenizer=tokenizer,
        chat_template=QWEN3_TEMPLATE,
    )


COSMOS3: Mapping[str, Family] = {
    "cosmos3_omni": Family(qwen_tokenizer, PACKED["qwen3_vl"].make_processor, _omni, QWEN_STOP, takes_videos=True),
    "cosmos3_edge": Family(qwen_tokenizer, _edge_processor, _edge, QWEN_STOP, takes_videos=True),
}
