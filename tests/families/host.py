"""Families that transformers' own generation runs: cross-attention to pictures, encoder-decoders."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import (
    CLIPImageProcessor,
    Florence2Config,
    Florence2ForConditionalGeneration,
    Florence2Processor,
    MllamaConfig,
    MllamaForConditionalGeneration,
    MllamaImageProcessor,
    MllamaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.apertus1p5 import apertus1p5, apertus1p5_processor, apertus1p5_tokenizer
from tests.families.captioning import CAPTIONING
from tests.families.host_templates import MLLAMA_TEMPLATE, florence2_tokenizer, mllama_tokenizer
from tests.families.recent import RECENT_HOSTED
from tests.families.recipes import HIDDEN, Family, text_config

MLLAMA_TILE = 28
MLLAMA_TILES = 4
FLORENCE_IMAGE = 32


def _mllama(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    image_token = tokenizer.convert_tokens_to_ids("<|image|>")
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_global_layers": 2,
        "attention_heads": 2,
        "vision_output_dim": 64,  # the last hidden state and one of an earlier layer
        "image_size": MLLAMA_TILE,
        "patch_size": 7,
        "max_num_tiles": MLLAMA_TILES,
        "intermediate_layers_indices": [1],
        "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1], [1, 3], [3, 1], [1, 4], [4, 1], [2, 2]],
    }
    text = text_config(tokenizer, "<|eot_id|>", num_hidden_layers=3, cross_attention_layers=[1])
    # As published: the picture's token has an embedding (of 8 beyond the vocabulary) but no row in the head.
    text["vocab_size"] = image_token
    config = MllamaConfig(text_config=text, vision_config=vision, image_token_index=image_token)
    return MllamaForConditionalGeneration(config)


def _mllama_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    images = MllamaImageProcessor(size={"height": MLLAMA_TILE, "width": MLLAMA_TILE}, max_image_tiles=MLLAMA_TILES)
    return MllamaProcessor(image_processor=images, tokenizer=tokenizer, chat_template=MLLAMA_TEMPLATE)


def _florence2(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    text = {
        "model_type": "bart",
        "vocab_size": len(tokenizer),
        "d_model": HIDDEN,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 1024,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.eos_token_id,
    }
    vision = {
        "depths": [1, 1],
        "patch_size": [7, 3],
        "patch_stride": [4, 2],
        "patch_padding": [3, 1],
        "patch_prenorm": [False, True],
        "embed_dim": [16, 32],
        "num_heads": [2, 2],
        "num_groups": [2, 2],
        "window_size": 3,
        "projection_dim": HIDDEN,
    }
    config = Florence2Config(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        decoder_start_token_id=tokenizer.eos_token_id,
    )
    return Florence2ForConditionalGeneration(config)


def _florence2_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Without a chat template, as the published checkpoints are."""
    images = CLIPImageProcessor(size={"height": FLORENCE_IMAGE, "width": FLORENCE_IMAGE}, do_center_crop=False)
    images.image_seq_length = (FLORENCE_IMAGE // 8) ** 2 + 1  # one token more: the mean over the picture
    return Florence2Processor(image_processor=images, tokenizer=tokenizer)


HOSTED: Mapping[str, Family] = {
    "apertus1p5": Family(
        apertus1p5_tokenizer, apertus1p5_processor, apertus1p5, ("<|im_end|>",), lacks=("tower", "connector")
    ),
    "florence2": Family(florence2_tokenizer, _florence2_processor, _florence2, ("</s>",)),
    "mllama": Family(mllama_tokenizer, _mllama_processor, _mllama, ("<|eot_id|>",)),
    **CAPTIONING,
    **RECENT_HOSTED,
}
