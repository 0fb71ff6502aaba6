"""LFM2-VL: padded patches, tiles with a thumbnail; a text model of short convolutions and attention."""

from __future__ import annotations

from transformers import (
    Lfm2VlConfig,
    Lfm2VlForConditionalGeneration,
    Lfm2VlImageProcessor,
    Lfm2VlProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.padded_templates import LFM2_NAMED, LFM2_SPECIAL, LFM2_TEMPLATE
from tests.families.recipes import PATCH, SMALL_TOWER, text_config
from tests.families.tokenizers_and_templates import qwen_tokenizer

TILE = 16


def lfm2_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(LFM2_SPECIAL, LFM2_NAMED, pad="<|pad|>", bos="<|startoftext|>")


def lfm2_vl(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        "model_type": "siglip2_vision_model",
        **SMALL_TOWER,
        "patch_size": PATCH,
        "num_patches": 16,
    }
    config = Lfm2VlConfig(
        text_config=text_config(
            tokenizer,
            "<|im_end|>",
            model_type="lfm2",
            num_hidden_layers=4,
            layer_types=["conv", "full_attention", "conv", "full_attention"],
            block_auto_adjust_ff_dim=False,
        ),
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        projector_hidden_size=48,
    )
    return Lfm2VlForConditionalGeneration(config)


def lfm2_vl_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Pictures beyond 1024 pixels are cut into tiles."""
    images = Lfm2VlImageProcessor(
        encoder_patch_size=PATCH, tile_size=TILE, min_image_tokens=2, max_image_tokens=8, max_tiles=4
    )
    return Lfm2VlProcessor(image_processor=images, tokenizer=tokenizer, chat_template=LFM2_TEMPLATE)
