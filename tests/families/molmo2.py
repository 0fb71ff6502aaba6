"""Molmo 2: a picture whole and in overlapping crops, patches pooled by attention, all pictures in one block."""

from __future__ import annotations

from transformers import (
    Molmo2Config,
    Molmo2ForConditionalGeneration,
    Molmo2ImageProcessor,
    Molmo2Processor,
    Molmo2VideoProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.recipes import HIDDEN, PATCH, SMALL_TOWER, text_config
from tests.families.tokenizers_and_templates import qwen_tokenizer
from tests.families.turns import chatml

CROP = 16
BASE_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MEDIA_SPECIAL = (
    "<im_start>",
    "<im_end>",
    "<im_patch>",
    "<im_col>",
    "<low_res_im_start>",
    "<|image|>",
    "<im_low>",
    "<frame_start>",
    "<frame_end>",
    "<|video|>",
)
"""In the order of their ids: they have embeddings beyond the vocabulary, and no rows in the head."""

TEMPLATE = chatml(image="<|image|>", video="<|video|>")


def molmo2_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer((*BASE_SPECIAL, *MEDIA_SPECIAL))


def molmo2(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    ids = tokenizer.convert_tokens_to_ids(list(MEDIA_SPECIAL))
    assert ids == sorted(ids)
    text = text_config(
        tokenizer, "<|im_end|>", head_dim=8, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    )
    text |= {"vocab_size": ids[0], "additional_vocab_size": len(ids), "rope_scaling_layers": [1]}
    tower = {
        **SMALL_TOWER,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "image_size": [CROP, CROP],
        "patch_size": PATCH,
    }
    adapter = {
        "vision_feature_layer": [2, 1],
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "text_hidden_size": HIDDEN,
    }
    named = dict(zip(MEDIA_SPECIAL, ids, strict=True))
    config = Molmo2Config(
        text_config=text,
        vision_config=tower,
        adapter_config=adapter,
        image_start_token_id=named["<im_start>"],
        low_res_image_start_token_id=named["<low_res_im_start>"],
        image_end_token_id=named["<im_end>"],
        image_patch_id=named["<im_patch>"],
        frame_start_token_id=named["<frame_start>"],
        frame_end_token_id=named["<frame_end>"],
    )
    return Molmo2ForConditionalGeneration(config)


def molmo2_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    size = {"height": CROP, "width": CROP}
    images = Molmo2ImageProcessor(size=size, patch_size=PATCH, max_crops=4, overlap_margins=[1, 1])
    videos = Molmo2VideoProcessor(size=size, patch_size=PATCH)
    return Molmo2Processor(image_processor=images, video_processor=videos, tokenizer=tokenizer, chat_template=TEMPLATE)
