"""Families with a Pixtral tower: pictures padded to one size for the patch embedding, packed in one row after it."""

from __future__ import annotations

from typing import Any

from transformers import (
    LightOnOcrConfig,
    LightOnOcrForConditionalGeneration,
    LightOnOcrProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.padded_templates import LIGHTON_NAMED, LIGHTON_TEMPLATE, PIXTRAL_SPECIAL, PIXTRAL_TEMPLATE
from tests.families.recipes import MERGE, PATCH, SMALL_TOWER, text_config
from tests.families.tokenizers_and_templates import QWEN_SPECIAL_TOKENS, qwen_tokenizer

LONGEST_EDGE = 48
"""Pixels: the larger of the tests' pictures are shrunk to it."""


def pixtral_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(PIXTRAL_SPECIAL, eos="</s>", pad="<pad>", bos="<s>")


def lighton_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(QWEN_SPECIAL_TOKENS, LIGHTON_NAMED)


def tower() -> dict[str, Any]:
    return {
        "model_type": "pixtral",
        **SMALL_TOWER,
        "image_size": LONGEST_EDGE,
        "patch_size": PATCH,
    }


def llava_pixtral(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Pixtral 12B as transformers has it."""
    config = LlavaConfig(
        text_config=text_config(tokenizer, "</s>", model_type="mistral", head_dim=8, sliding_window=None),
        vision_config=tower(),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return LlavaForConditionalGeneration(config)


def mistral3(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = Mistral3Config(
        text_config=text_config(tokenizer, "</s>", model_type="mistral", head_dim=8, sliding_window=None),
        vision_config=tower(),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=MERGE,
        tie_word_embeddings=False,
    )
    return Mistral3ForConditionalGeneration(config)


def lighton_ocr(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = LightOnOcrConfig(
        text_config=text_config(tokenizer, "<|im_end|>", model_type="qwen3", head_dim=8),
        vision_config=tower(),
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        spatial_merge_size=MERGE,
        tie_word_embeddings=False,
    )
    return LightOnOcrForConditionalGeneration(config)


def _images(patch: int) -> PixtralImageProcessor:
    return PixtralImageProcessor(size={"longest_edge": LONGEST_EDGE}, patch_size={"height": patch, "width": patch})


def llava_pixtral_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return PixtralProcessor(
        image_processor=_images(PATCH), tokenizer=tokenizer, patch_size=PATCH, chat_template=PIXTRAL_TEMPLATE
    )


def mistral3_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return PixtralProcessor(
        image_processor=_images(PATCH),
        tokenizer=tokenizer,
        patch_size=PATCH,
        spatial_merge_size=MERGE,
        chat_template=PIXTRAL_TEMPLATE,
    )


def lighton_ocr_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return LightOnOcrProcessor(
        image_processor=_images(PATCH * MERGE),
        tokenizer=tokenizer,
        patch_size=PATCH,
        spatial_merge_size=MERGE,
        chat_template=LIGHTON_TEMPLATE,
    )
