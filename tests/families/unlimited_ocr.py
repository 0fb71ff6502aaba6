"""Unlimited-OCR: SAM and CLIP in a row, tiles of large pictures, a text model that forgets its own older words only."""

from __future__ import annotations

from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    UnlimitedOcrConfig,
    UnlimitedOcrForConditionalGeneration,
    UnlimitedOcrImageProcessor,
    UnlimitedOcrProcessor,
)

from tests.families.deepseek_ocr2 import PATCH, SAM_CONFIG, SIDE
from tests.families.recipes import SMALL_TOWER, text_config
from tests.families.squares_templates import CHATML_SPECIAL
from tests.families.tokenizers_and_templates import qwen_tokenizer
from tests.families.turns import chatml

WINDOW = 2
"""Generated tokens that a generated token sees, besides the prompt."""


def unlimited_ocr_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer((*CHATML_SPECIAL, "<image>"))


def unlimited_ocr(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    encoder = {
        **SMALL_TOWER,
        "image_size": 42,
        "patch_size": 14,
    }
    text = text_config(
        tokenizer,
        "<|im_end|>",
        sliding_window=WINDOW,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_shared_experts=1,
        mlp_layer_types=["dense", "sparse"],
    )
    config = UnlimitedOcrConfig(
        text_config=text,
        vision_config={"sam_config": SAM_CONFIG, "encoder_config": encoder},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    return UnlimitedOcrForConditionalGeneration(config)


def unlimited_ocr_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return UnlimitedOcrProcessor(
        image_processor=UnlimitedOcrImageProcessor(size={"height": SIDE, "width": SIDE}, tile_size=SIDE, max_patches=3),
        tokenizer=tokenizer,
        patch_size=PATCH,
        downsample_ratio=4,
        chat_template=chatml(image="<image>\\n"),
    )
