"""PaliGemma: a prefix-LM over Gemma, without a chat template."""

from __future__ import annotations

from typing import Any

from transformers import (
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    SiglipImageProcessor,
)

from tests.families.recipes import HIDDEN, SMALL_TOWER, text_config, vocab_size
from tests.families.tokenizers_and_templates import gemma_tokenizer

IMAGE = 28
PATCH = 7


def paligemma_tokenizer() -> PreTrainedTokenizerBase:
    """Gemma's, without its turns and pictures: the processor adds `<image>` and the tokens for places and segments."""
    return gemma_tokenizer(turn_tokens=(), named={})


def paligemma(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return _paligemma(tokenizer, text_config(tokenizer, "<eos>", model_type="gemma", head_dim=8))


def paligemma2(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Over Gemma 2: capped scores (at a size that they reach), every second layer with a window."""
    text = text_config(
        tokenizer,
        "<eos>",
        model_type="gemma2",
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=8,
        attn_logit_softcapping=1.5,
    )
    return _paligemma(tokenizer, text)


def _paligemma(tokenizer: PreTrainedTokenizerBase, text: dict[str, Any]) -> PreTrainedModel:
    paligemma_processor(tokenizer)  # it adds tokens to the tokenizer
    vision = {
        "model_type": "siglip_vision_model",
        **SMALL_TOWER,
        "image_size": IMAGE,
        "patch_size": PATCH,
        "vision_use_head": False,
    }
    config = PaliGemmaConfig(
        text_config=text,
        vision_config=vision,
        projection_dim=HIDDEN,
        hidden_size=HIDDEN,
        vocab_size=vocab_size(tokenizer),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    return PaliGemmaForConditionalGeneration(config)


def paligemma_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    half = [0.5, 0.5, 0.5]
    images = SiglipImageProcessor(
        size={"height": IMAGE, "width": IMAGE},
        image_mean=half,
        image_std=half,
        image_seq_length=(IMAGE // PATCH) ** 2,
    )
    return PaliGemmaProcessor(image_processor=images, tokenizer=tokenizer)
