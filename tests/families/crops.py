"""Families that cut a picture into crops of one size by its aspect ratio: InternVL, Aya Vision and their kin."""

from __future__ import annotations

from transformers import (
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.recipes import text_config
from tests.families.tiled_templates import CHATML_SPECIAL, INTERNVL_NAMED, INTERNVL_TEMPLATE
from tests.families.tokenizers_and_templates import qwen_tokenizer

SIDE = 28
PATCH = 7
HALF = [0.5, 0.5, 0.5]
MAX_CROPS = 3


def internvl_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(CHATML_SPECIAL, INTERNVL_NAMED)


def internvl(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": [SIDE, SIDE],
        "patch_size": [PATCH, PATCH],
    }
    config = InternVLConfig(
        text_config=text_config(tokenizer, "<|im_end|>", model_type="qwen2"),
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=(SIDE // PATCH // 2) ** 2,
        tie_word_embeddings=False,
    )
    return InternVLForConditionalGeneration(config)


def internvl_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    size = {"height": SIDE, "width": SIDE}
    return InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(
            size=size, crop_to_patches=True, max_patches=MAX_CROPS, image_mean=HALF, image_std=HALF
        ),
        video_processor=InternVLVideoProcessor(size=size, image_mean=HALF, image_std=HALF),
        tokenizer=tokenizer,
        image_seq_length=(SIDE // PATCH // 2) ** 2,
        chat_template=INTERNVL_TEMPLATE,
    )
