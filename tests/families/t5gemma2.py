"""T5Gemma 2: an encoder that sees pictures, a decoder that attends to itself and the encoder at once."""

from __future__ import annotations

from typing import Any

from transformers import (
    Gemma3ImageProcessor,
    Gemma3Processor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    T5Gemma2Config,
    T5Gemma2ForConditionalGeneration,
)

from tests.families.recipes import SMALL_TOWER, text_config
from tests.families.tokenizers_and_templates import GEMMA_IMAGE_TOKENS, gemma_tokenizer

IMAGE = 28
SIDE = 2
"""Of the grid of a picture's tokens."""


def t5gemma2_tokenizer() -> PreTrainedTokenizerBase:
    return gemma_tokenizer(turn_tokens=())


def t5gemma2(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    def text() -> dict[str, Any]:
        return text_config(
            tokenizer,
            "<eos>",
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
        )

    vision = {
        "model_type": "siglip_vision_model",
        **SMALL_TOWER,
        "image_size": IMAGE,
        "patch_size": 7,
        "vision_use_head": False,
    }
    ids = {f"{name}_index": tokenizer.convert_tokens_to_ids(token) for name, token in GEMMA_IMAGE_TOKENS.items()}
    encoder = {"text_config": text(), "vision_config": vision, "mm_tokens_per_image": SIDE * SIDE, **ids}
    config = T5Gemma2Config(encoder=encoder, decoder=text(), image_token_index=ids["image_token_index"])
    return T5Gemma2ForConditionalGeneration(config)


def t5gemma2_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Without a chat template, as the published checkpoints are."""
    images = Gemma3ImageProcessor(size={"height": IMAGE, "width": IMAGE})
    return Gemma3Processor(image_processor=images, tokenizer=tokenizer, image_seq_length=SIDE * SIDE)
