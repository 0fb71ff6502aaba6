"""Apertus 1.5: a picture becomes codes of a codebook, which are tokens of the text model's vocabulary."""

from __future__ import annotations

from transformers import (
    Apertus1p5Config,
    Apertus1p5ForConditionalGeneration,
    Apertus1p5ImageProcessor,
    Apertus1p5Processor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    WavTokenizerFeatureExtractor,
)

from tests.families.recipes import text_config
from tests.families.squares_templates import CHATML_SPECIAL
from tests.families.tokenizers_and_templates import qwen_tokenizer
from tests.families.turns import chatml

STRIDE = 4
PICTURE_CODES = 32
SOUND_CODES = 8
NAMED = {
    "image_token": "<|image|>",
    "audio_token": "<|audio|>",
    "boi_token": "<|img_start|>",
    "eoi_token": "<|img_end|>",
    "image_wrapper_token": "<|img_token_start|>",
    "eol_token": "<|img_end_of_row|>",
    "boa_token": "<|audio_start|>",
    "eoa_token": "<|audio_end|>",
}


def apertus1p5_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(CHATML_SPECIAL, NAMED)


def apertus1p5(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The head has rows for text only."""
    num_text_tokens = len(tokenizer)
    vision = {
        "codebook_size": PICTURE_CODES,
        "embed_dim": 8,
        "latent_channels": 8,
        "base_channels": 32,
        "channel_multiplier": [1, 1, 1],
        "num_res_blocks": 1,
        "attn_resolutions": [],
        "resolution": 64,
    }
    audio = {
        "model_type": "wavtokenizer_encoder",
        "num_filters": 4,
        "upsampling_ratios": [2, 2],
        "hidden_size": 16,
        "codebook_size": SOUND_CODES,
        "codebook_dim": 16,
        "num_lstm_layers": 1,
    }
    text = text_config(
        tokenizer,
        "<|im_end|>",
        vocab_size=num_text_tokens + PICTURE_CODES + SOUND_CODES,
        output_vocab_size=num_text_tokens,
    )
    config = Apertus1p5Config(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image|>"),
        audio_token_id=tokenizer.convert_tokens_to_ids("<|audio|>"),
        image_token_offset=num_text_tokens,
        audio_token_offset=num_text_tokens + PICTURE_CODES,
    )
    return Apertus1p5ForConditionalGeneration(config)


def apertus1p5_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    size = {"min_pixels": 16 * 16, "max_pixels": 32 * 32}
    return Apertus1p5Processor(
        image_processor=Apertus1p5ImageProcessor(size=size, spatial_factor=STRIDE),
        feature_extractor=WavTokenizerFeatureExtractor(hop_length=STRIDE),
        tokenizer=tokenizer,
        chat_template=chatml(image="<|image|>"),
    )
