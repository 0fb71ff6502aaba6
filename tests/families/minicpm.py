"""MiniCPM-V 4.6: pictures and their slices in one strip, a merger amid the tower, a text model that carries states."""

from __future__ import annotations

from transformers import (
    MiniCPMV4_6Config,
    MiniCPMV4_6ForConditionalGeneration,
    MiniCPMV4_6ImageProcessor,
    MiniCPMV4_6Processor,
    MiniCPMV4_6VideoProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.packed import QWEN3_5_TEXT
from tests.families.padded_templates import MINICPM_NAMED, MINICPM_TEMPLATE
from tests.families.recipes import PATCH, text_config
from tests.families.tokenizers_and_templates import qwen_tokenizer

RESOLUTION = 32
"""Pixels: larger pictures are cut into slices of about this side."""


def minicpm_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(named=MINICPM_NAMED)


def minicpmv4_6(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": PATCH,
    }
    config = MiniCPMV4_6Config(
        text_config=text_config(tokenizer, "<|im_end|>", model_type="qwen3_5_text", **QWEN3_5_TEXT),
        vision_config=vision,
        insert_layer_id=1,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
    )
    return MiniCPMV4_6ForConditionalGeneration(config)


def minicpmv4_6_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    sizes = {"scale_resolution": RESOLUTION, "patch_size": PATCH, "max_slice_nums": 4}
    return MiniCPMV4_6Processor(
        image_processor=MiniCPMV4_6ImageProcessor(**sizes),
        video_processor=MiniCPMV4_6VideoProcessor(**{**sizes, "max_slice_nums": 1}),
        tokenizer=tokenizer,
        chat_template=MINICPM_TEMPLATE,
    )
