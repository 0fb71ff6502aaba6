"""PaddleOCR-VL: patches as small pictures, and a connector that is called once for each picture."""

from __future__ import annotations

from transformers import (
    PaddleOCRVLConfig,
    PaddleOCRVLForConditionalGeneration,
    PaddleOCRVLImageProcessor,
    PaddleOCRVLProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.packed_templates import PADDLE_NAMED, PADDLE_SPECIAL, PADDLE_TEMPLATE
from tests.families.recipes import MAX_PIXELS, MERGE, PATCH, SMALL_TOWER, mrope, text_config
from tests.families.tokenizers_and_templates import qwen_tokenizer


def paddleocr_vl_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(PADDLE_SPECIAL, PADDLE_NAMED, eos="</s>", pad="<unk>", bos="<s>")


def paddleocr_vl(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        **SMALL_TOWER,
        "image_size": 16,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
    }
    config = PaddleOCRVLConfig(
        text_config=text_config(
            tokenizer, "</s>", head_dim=8, rope_parameters=mrope(1, 1, 2), tie_word_embeddings=False
        ),
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<|IMAGE_PLACEHOLDER|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|IMAGE_START|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|IMAGE_END|>"),
        tie_word_embeddings=False,
    )
    return PaddleOCRVLForConditionalGeneration(config)


def paddleocr_vl_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    size = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": MAX_PIXELS}
    return PaddleOCRVLProcessor(
        image_processor=PaddleOCRVLImageProcessor(patch_size=PATCH, merge_size=MERGE, size=size),
        tokenizer=tokenizer,
        chat_template=PADDLE_TEMPLATE,
    )
