"""Families whose tower takes pictures as tiles of one size: LLaVA, Gemma 3 and their kin."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import (
    CLIPImageProcessor,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families import anyres, crops
from tests.families.deepseek_ocr2 import deepseek_ocr2, deepseek_ocr2_processor, deepseek_ocr2_tokenizer
from tests.families.paligemma import paligemma, paligemma_processor, paligemma_tokenizer
from tests.families.recipes import SMALL_TOWER, Family, text_config
from tests.families.tokenizers_and_templates import (
    GEMMA3_TEMPLATE,
    LLAVA_TEMPLATE,
    gemma_tokenizer,
    llava_tokenizer,
)

GEMMA_IMAGE = 56
GEMMA_TOKENS_PER_IMAGE = 16
GEMMA_WINDOW = 8
"""Shorter than an image's tokens: masks that mix up windows and bidirectional spans show."""


def _gemma3(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        **SMALL_TOWER,
        "num_hidden_layers": 3,
        "image_size": GEMMA_IMAGE,
        "patch_size": 7,
        "vision_use_head": False,
    }
    config = Gemma3Config(
        text_config=text_config(
            tokenizer,
            "<eos>",
            head_dim=8,
            num_hidden_layers=3,
            sliding_window=GEMMA_WINDOW,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            query_pre_attn_scalar=8,
        ),
        vision_config=vision,
        mm_tokens_per_image=GEMMA_TOKENS_PER_IMAGE,
        image_token_index=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
        eos_token_id=[tokenizer.convert_tokens_to_ids(token) for token in ("<eos>", "<end_of_turn>")],
    )
    return Gemma3ForConditionalGeneration(config)


LLAVA_PATCH = 7


def _llava(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        "model_type": "clip_vision_model",
        **SMALL_TOWER,
        "num_hidden_layers": 3,
        "image_size": 28,
        "patch_size": LLAVA_PATCH,
        "projection_dim": 32,
    }
    config = LlavaConfig(
        text_config=text_config(tokenizer, "</s>", model_type="llama", head_dim=8),
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(28 // LLAVA_PATCH) ** 2,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    return LlavaForConditionalGeneration(config)


def _gemma3_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    half = [0.5, 0.5, 0.5]
    images = Gemma3ImageProcessor(size={"height": GEMMA_IMAGE, "width": GEMMA_IMAGE}, image_mean=half, image_std=half)
    return Gemma3Processor(
        image_processor=images,
        tokenizer=tokenizer,
        chat_template=GEMMA3_TEMPLATE,
        image_seq_length=GEMMA_TOKENS_PER_IMAGE,
    )


def _llava_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    images = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=LLAVA_PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=LLAVA_TEMPLATE,
    )


CHATML_STOP = ("<|im_end|>",)
COHERE_STOP = ("<|END_OF_TURN_TOKEN|>",)
GRANITE_STOP = ("<|end_of_text|>",)

TILED: Mapping[str, Family] = {
    "gemma3": Family(gemma_tokenizer, _gemma3_processor, _gemma3, ("<eos>", "<end_of_turn>")),
    "llava": Family(llava_tokenizer, _llava_processor, _llava, ("</s>",)),
    "paligemma": Family(
        paligemma_tokenizer, paligemma_processor, paligemma, ("<eos>",), needs_picture=True, takes_turns=False
    ),
    "internvl": Family(
        crops.internvl_tokenizer,
        crops.internvl_processor,
        crops.internvl,
        CHATML_STOP,
        takes_videos=True,
        stacks_videos=True,
    ),
    "llava_next": Family(llava_tokenizer, anyres.llava_next_processor, anyres.llava_next, ("</s>",)),
    "llava_next_granite": Family(
        anyres.granite_tokenizer, anyres.llava_next_granite_processor, anyres.llava_next_granite, GRANITE_STOP
    ),
    "llava_next_video": Family(
        anyres.llava_next_video_tokenizer,
        anyres.llava_next_video_processor,
        anyres.llava_next_video,
        ("</s>",),
        takes_videos=True,
        stacks_videos=True,
    ),
    "llava_onevision": Family(
        anyres.onevision_tokenizer,
        anyres.llava_onevision_processor,
        anyres.llava_onevision,
        CHATML_STOP,
        takes_videos=True,
        stacks_videos=True,
    ),
    "granite4_vision": Family(
        anyres.granite_tokenizer, anyres.granite4_vision_processor, anyres.granite4_vision, GRANITE_STOP
    ),
    "vipllava": Family(llava_tokenizer, anyres.vipllava_processor, anyres.vipllava, ("</s>",)),
    "aya_vision": Family(crops.aya_tokenizer, crops.aya_vision_processor, crops.aya_vision, COHERE_STOP),
    "cohere2_vision": Family(
        crops.cohere2_tokenizer, crops.cohere2_vision_processor, crops.cohere2_vision, COHERE_STOP
    ),
    "ovis2": Family(crops.ovis2_tokenizer, crops.ovis2_processor, crops.ovis2, CHATML_STOP),
    "got_ocr2": Family(
        crops.got_tokenizer,
        crops.got_ocr2_processor,
        crops.got_ocr2,
        CHATML_STOP,
        needs_picture=True,
        takes_turns=False,
    ),
    "llama4": Family(crops.llama4_tokenizer, crops.llama4_processor, crops.llama4, ("<|eot|>",)),
    "deepseek_ocr2": Family(
        deepseek_ocr2_tokenizer, deepseek_ocr2_processor, deepseek_ocr2, ("<eos>",), takes_turns=False
    ),
    "video_llava": Family(
        anyres.llava_next_video_tokenizer,
        anyres.video_llava_processor,
        anyres.video_llava,
        ("</s>",),
        takes_videos=True,
        stacks_videos=True,
    ),
}
