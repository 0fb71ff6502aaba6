"""Idefics 2 and 3 and SmolVLM: pictures as tiles, missing ones filled with zeros that the model drops again."""

from __future__ import annotations

from typing import Any

from transformers import (
    Idefics2Config,
    Idefics2ForConditionalGeneration,
    Idefics2ImageProcessor,
    Idefics2Processor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from tests.families.padded_templates import (
    IDEFICS2_SPECIAL,
    IDEFICS2_TEMPLATE,
    IDEFICS3_SPECIAL,
    IDEFICS3_TEMPLATE,
    SMOLVLM_NAMED,
    SMOLVLM_TEMPLATE,
)
from tests.families.recipes import HIDDEN, SMALL_TOWER, text_config
from tests.families.tokenizers_and_templates import llava_tokenizer, qwen_tokenizer

SIDE = 28
PATCH = 7
SCALE = 2
TOKENS_PER_TILE = (SIDE // PATCH // SCALE) ** 2
NUM_LATENTS = 3


def idefics2_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = llava_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(IDEFICS2_SPECIAL)})
    return tokenizer


def idefics3_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(IDEFICS3_SPECIAL, eos="<end_of_utterance>", pad="<|end_of_text|>", bos="<|begin_of_text|>")


def smolvlm_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(
        IDEFICS3_SPECIAL, SMOLVLM_NAMED, eos="<end_of_utterance>", pad="<|end_of_text|>", bos="<|im_start|>"
    )


def _tower() -> dict[str, Any]:
    return {
        **SMALL_TOWER,
        "image_size": SIDE,
        "patch_size": PATCH,
    }


def idefics2(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    perceiver = {
        "hidden_size": HIDDEN,
        "resampler_n_latents": NUM_LATENTS,
        "resampler_depth": 2,
        "resampler_n_heads": 2,
        "resampler_head_dim": 16,
        "num_key_value_heads": 1,
    }
    config = Idefics2Config(
        text_config=text_config(tokenizer, "</s>", model_type="mistral", head_dim=8, sliding_window=None),
        vision_config=_tower(),
        perceiver_config=perceiver,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    return Idefics2ForConditionalGeneration(config)


def idefics3(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = Idefics3Config(
        text_config=text_config(tokenizer, "<end_of_utterance>", model_type="llama", head_dim=8),
        vision_config=_tower(),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=SCALE,
    )
    return Idefics3ForConditionalGeneration(config)


def smolvlm(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = SmolVLMConfig(
        text_config=text_config(tokenizer, "<end_of_utterance>", model_type="llama", head_dim=8),
        vision_config=_tower(),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=SCALE,
    )
    return SmolVLMForConditionalGeneration(config)


def idefics2_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Pictures keep their shape: padded to the largest."""
    images = Idefics2ImageProcessor(size={"shortest_edge": 14, "longest_edge": SIDE})
    return Idefics2Processor(
        image_processor=images, tokenizer=tokenizer, image_seq_len=NUM_LATENTS, chat_template=IDEFICS2_TEMPLATE
    )


def idefics3_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    images = Idefics3ImageProcessor(size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE})
    return Idefics3Processor(
        image_processor=images, tokenizer=tokenizer, image_seq_len=TOKENS_PER_TILE, chat_template=IDEFICS3_TEMPLATE
    )


def smolvlm_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    sides = {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
    sampling = {"fps": 1, "max_frames": 8, "video_size": {"longest_edge": SIDE}}
    return SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(**sides),
        video_processor=SmolVLMVideoProcessor(max_image_size={"longest_edge": SIDE}, video_sampling=sampling),
        tokenizer=tokenizer,
        image_seq_len=TOKENS_PER_TILE,
        chat_template=SMOLVLM_TEMPLATE,
    )
