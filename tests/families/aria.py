"""Aria: pictures of any shape on one square with a mask, a projector of learned queries, experts in the text model."""

from __future__ import annotations

from transformers import (
    AriaConfig,
    AriaForConditionalGeneration,
    AriaImageProcessor,
    AriaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.recipes import SMALL_TOWER, text_config
from tests.families.squares_templates import ARIA_NAMED, ARIA_SPECIAL, ARIA_TEMPLATE
from tests.families.tokenizers_and_templates import qwen_tokenizer

SIDE = 490
"""The smaller of the two sides its image processor takes."""
PATCH = 98
NUM_PATCHES = (SIDE // PATCH) ** 2
NUM_QUERIES = 8

AriaProcessor.images_kwargs = {**AriaProcessor.images_kwargs, "max_image_size": SIDE}
"""A checkpoint cannot set it: with the class's own 980, pictures would have four times as many pixels."""


def aria_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(ARIA_SPECIAL, ARIA_NAMED)


def aria(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        "model_type": "idefics3_vision",
        **SMALL_TOWER,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    config = AriaConfig(
        text_config=text_config(tokenizer, "<|im_end|>", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids("<|img|>"),
        projector_patch_to_query_dict={NUM_PATCHES: NUM_QUERIES},
        vision_feature_layer=-1,
    )
    return AriaForConditionalGeneration(config)


def aria_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return AriaProcessor(
        image_processor=AriaImageProcessor(max_image_size=SIDE, min_image_size=PATCH),
        tokenizer=tokenizer,
        size_conversion={SIDE: NUM_QUERIES},
        chat_template=ARIA_TEMPLATE,
    )
