"""Qianfan-OCR: InternVL's design over Qwen 3; its template writes a text for a picture that is no token."""

from __future__ import annotations

from transformers import (
    GotOcr2ImageProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    QianfanOCRConfig,
    QianfanOCRForConditionalGeneration,
    QianfanOCRProcessor,
)

from tests.families.crops import HALF, MAX_CROPS, PATCH, SIDE, internvl_tokenizer
from tests.families.recipes import SMALL_TOWER, text_config
from tests.families.turns import chatml

qianfan_tokenizer = internvl_tokenizer
NUM_TOKENS = (SIDE // PATCH // 2) ** 2


def qianfan_ocr(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        **SMALL_TOWER,
        "image_size": [SIDE, SIDE],
        "patch_size": [PATCH, PATCH],
        "use_qk_norm": True,
        "norm_type": "rms_norm",
    }
    config = QianfanOCRConfig(
        text_config=text_config(tokenizer, "<|im_end|>", model_type="qwen3", head_dim=8),
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=NUM_TOKENS,
    )
    return QianfanOCRForConditionalGeneration(config)


def qianfan_ocr_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    images = GotOcr2ImageProcessor(
        size={"height": SIDE, "width": SIDE},
        crop_to_patches=True,
        max_patches=MAX_CROPS,
        image_mean=HALF,
        image_std=HALF,
    )
    return QianfanOCRProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        image_seq_length=NUM_TOKENS,
        chat_template=chatml(image="<image>\\n"),
    )
