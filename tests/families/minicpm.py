"""MiniCPM-V 4.6 and its kin: pictures and their slices in one strip, a merger amid the tower, a text model that
carries states."""

from __future__ import annotations

from typing import Any

from transformers import (
    MiniCPMOcrConfig,
    MiniCPMOcrForConditionalGeneration,
    MiniCPMOcrImageProcessor,
    MiniCPMOcrProcessor,
    MiniCPMOcrVideoProcessor,
    MiniCPMV4_6Config,
    MiniCPMV4_6ForConditionalGeneration,
    MiniCPMV4_6ImageProcessor,
    MiniCPMV4_6Processor,
    MiniCPMV4_6VideoProcessor,
    MiniCPMV4_7Config,
    MiniCPMV4_7ForConditionalGeneration,
    MiniCPMV4_7Processor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.packed import QWEN3_5_TEXT
from tests.families.padded_templates import MINICPM_NAMED, MINICPM_TEMPLATE
from tests.families.recipes import PATCH, SMALL_TOWER, text_config
from tests.families.tokenizers_and_templates import qwen_tokenizer

RESOLUTION = 32
"""Pixels: larger pictures are cut into slices of about this side."""


def minicpm_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(named=MINICPM_NAMED)


def _shared(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    vision = {
        **SMALL_TOWER,
        "num_hidden_layers": 3,
        "image_size": 64,
        "patch_size": PATCH,
    }
    return {
        "text_config": text_config(tokenizer, "<|im_end|>", model_type="qwen3_5_text", **QWEN3_5_TEXT),
        "vision_config": vision,
        "insert_layer_id": 1,
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
    }


def minicpmv4_6(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return MiniCPMV4_6ForConditionalGeneration(MiniCPMV4_6Config(**_shared(tokenizer)))


def minicpmv4_7(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Positions lie on a canvas of a picture and its slices."""
    marks = {
        "image_start_id": MINICPM_NAMED["image_start_token"],
        "image_end_id": MINICPM_NAMED["image_end_token"],
        "slice_start_id": MINICPM_NAMED["slice_start_token"],
        "slice_end_id": MINICPM_NAMED["slice_end_token"],
        "newline_id": "Ċ",
    }
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in marks.items()}
    return MiniCPMV4_7ForConditionalGeneration(MiniCPMV4_7Config(**_shared(tokenizer), **ids))


def minicpm_ocr(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """MiniCPM-V 4.6's model, but the merger amid the tower is left out: four times as many tokens."""
    return MiniCPMOcrForConditionalGeneration(MiniCPMOcrConfig(**_shared(tokenizer), tie_word_embeddings=False))


SIZES = {"scale_resolution": RESOLUTION, "patch_size": PATCH, "max_slice_nums": 4}
VIDEO_SIZES = {**SIZES, "max_slice_nums": 1}


def minicpmv4_6_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return MiniCPMV4_6Processor(
        image_processor=MiniCPMV4_6ImageProcessor(**SIZES),
        video_processor=MiniCPMV4_6VideoProcessor(**VIDEO_SIZES),
        tokenizer=tokenizer,
        chat_template=MINICPM_TEMPLATE,
    )


def minicpmv4_7_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return MiniCPMV4_7Processor(
        image_processor=MiniCPMV4_6ImageProcessor(**SIZES),
        video_processor=MiniCPMV4_6VideoProcessor(**VIDEO_SIZES),
        tokenizer=tokenizer,
        chat_template=MINICPM_TEMPLATE,
    )


def minicpm_ocr_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return MiniCPMOcrProcessor(
        image_processor=MiniCPMOcrImageProcessor(**SIZES),
        video_processor=MiniCPMOcrVideoProcessor(**VIDEO_SIZES),
        tokenizer=tokenizer,
        chat_template=MINICPM_TEMPLATE,
    )
