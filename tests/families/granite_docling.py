"""Granite Docling: tiles of a page and a thumbnail, a connector within the tower's module, deepstack."""

from __future__ import annotations

from transformers import (
    GraniteDoclingConfig,
    GraniteDoclingForConditionalGeneration,
    GraniteDoclingImageProcessor,
    GraniteDoclingProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.recipes import HIDDEN, SMALL_TOWER, text_config
from tests.families.squares_templates import DOCLING_SPECIAL
from tests.families.tiled_templates import GRANITE_TEMPLATE
from tests.families.tokenizers_and_templates import qwen_tokenizer

TILE = 32
PATCH = 4
SCALE = 4
MAX_TILES = 4


def granite_docling_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(DOCLING_SPECIAL, eos="<|end_of_text|>", pad="<|pad|>", bos="<|end_of_text|>")


def granite_docling(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        **SMALL_TOWER,
        "num_hidden_layers": 3,
        "image_size": TILE,
        "patch_size": PATCH,
        "out_hidden_size": HIDDEN,
        "scale_factor": SCALE,
        "deepstack_visual_indexes": [0, 1],
    }
    text = text_config(
        tokenizer,
        "<|end_of_text|>",
        num_hidden_layers=3,
        embedding_multiplier=2.0,
        attention_multiplier=0.3,
        residual_multiplier=0.7,
        logits_scaling=4.0,
        tie_word_embeddings=False,
    )
    config = GraniteDoclingConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        density_router_hidden_size=16,
    )
    return GraniteDoclingForConditionalGeneration(config)


def granite_docling_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return GraniteDoclingProcessor(
        image_processor=GraniteDoclingImageProcessor(size={"height": TILE, "width": TILE}, max_patches=MAX_TILES),
        tokenizer=tokenizer,
        image_seq_len=(TILE // PATCH // SCALE) ** 2,
        chat_template=GRANITE_TEMPLATE,
    )
