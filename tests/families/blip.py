"""BLIP-2 and its kin: queries read a picture, and what they found goes before the text."""

from __future__ import annotations

from typing import Any

from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    BlipImageProcessor,
    InstructBlipConfig,
    InstructBlipForConditionalGeneration,
    InstructBlipProcessor,
    InstructBlipVideoConfig,
    InstructBlipVideoForConditionalGeneration,
    InstructBlipVideoProcessor,
    InstructBlipVideoVideoProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.recipes import SMALL_TOWER, text_config, vocab_size
from tests.families.tokenizers_and_templates import llava_tokenizer

SIDE = 28
PATCH = 7
NUM_QUERIES = 6


def blip_tokenizer() -> PreTrainedTokenizerBase:
    return llava_tokenizer(("<image>", "<pad>"))


def _vision() -> dict[str, Any]:
    return {
        **SMALL_TOWER,
        "image_size": SIDE,
        "patch_size": PATCH,
    }


def _qformer(**more: Any) -> dict[str, Any]:
    shape = {
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return {**shape, **more}


def blip_images() -> BlipImageProcessor:
    return BlipImageProcessor(size={"height": SIDE, "width": SIDE})


def blip_2(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    text = {
        "model_type": "opt",
        "vocab_size": vocab_size(tokenizer),
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = Blip2Config(
        vision_config=_vision(),
        qformer_config=_qformer(),
        text_config=text,
        num_query_tokens=NUM_QUERIES,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    return Blip2ForConditionalGeneration(config)


def blip_2_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return Blip2Processor(blip_images(), tokenizer, num_query_tokens=NUM_QUERIES)


def instructblip(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Over Vicuna: its queries read the question too."""
    config = InstructBlipConfig(
        vision_config=_vision(),
        qformer_config=_qformer(vocab_size=vocab_size(tokenizer)),
        text_config=text_config(tokenizer, "</s>", model_type="llama", head_dim=8, tie_word_embeddings=False),
        num_query_tokens=NUM_QUERIES,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    return InstructBlipForConditionalGeneration(config)


def instructblip_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return InstructBlipProcessor(blip_images(), tokenizer, llava_tokenizer(("<pad>",)), num_query_tokens=NUM_QUERIES)


def video_tokenizer() -> PreTrainedTokenizerBase:
    return llava_tokenizer(("<video>", "<pad>"))


def instructblipvideo(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The same, of four frames."""
    config = InstructBlipVideoConfig(
        vision_config=_vision(),
        qformer_config=_qformer(vocab_size=vocab_size(tokenizer)),
        text_config=text_config(tokenizer, "</s>", model_type="llama", head_dim=8, tie_word_embeddings=False),
        num_query_tokens=NUM_QUERIES,
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
    )
    return InstructBlipVideoForConditionalGeneration(config)


def instructblipvideo_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    videos = InstructBlipVideoVideoProcessor(size={"height": SIDE, "width": SIDE})
    return InstructBlipVideoProcessor(videos, tokenizer, llava_tokenizer(("<pad>",)), num_query_tokens=NUM_QUERIES)
