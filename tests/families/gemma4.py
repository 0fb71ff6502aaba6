"""Gemma 4: padded patches; layers of unequal heads, windows, shared keys; a second embedding, or experts."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma4AudioFeatureExtractor,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4VideoProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.padded_templates import GEMMA4_NAMED, GEMMA4_TEMPLATE, GEMMA4_TURN_TOKENS
from tests.families.recipes import SMALL_TOWER, text_config, vocab_size
from tests.families.tokenizers_and_templates import gemma_tokenizer

PATCH = 4
POOL = 2
MAX_TOKENS = 70
"""The fewest that the processors allow."""
WINDOW = 8
BOUND = 1.5
"""Of what clipped layers take and give: near enough to be reached."""


def gemma4_tokenizer() -> PreTrainedTokenizerBase:
    return gemma_tokenizer(GEMMA4_TURN_TOKENS, GEMMA4_NAMED)


def _gemma4(tokenizer: PreTrainedTokenizerBase, text: dict[str, Any], vision: dict[str, Any]) -> PreTrainedModel:
    ids = {
        f"{name}_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in {**GEMMA4_NAMED, "video_token": "<|video|>"}.items()
        if name != "eoa_token"
    }
    tower = {
        **SMALL_TOWER,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "pooling_kernel_size": POOL,
        "patch_size": PATCH,
        "position_embedding_size": MAX_TOKENS * POOL,
    }
    config = Gemma4Config(
        text_config=text_config(
            tokenizer,
            "<turn|>",
            head_dim=8,
            global_head_dim=16,
            sliding_window=WINDOW,
            num_hidden_layers=4,
            layer_types=["sliding_attention", "full_attention"] * 2,
            **text,
        ),
        vision_config={**tower, **vision},
        audio_config=None,
        **ids,
    )
    return Gemma4ForConditionalGeneration(config)


def small(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """E2B and E4B without their audio tower."""
    text = {
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": vocab_size(tokenizer),
        "final_logit_softcapping": 30.0,
    }
    model = _gemma4(tokenizer, text, {"use_clipped_linears": True})
    for name, buffer in model.model.vision_tower.named_buffers():
        if name.endswith(("put_min", "put_max")):
            buffer.fill_(BOUND if name.endswith("max") else -BOUND)
    return model


def large(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """26B-A4B: pictures are seen both ways by windowed layers, keys serve as values, experts."""
    text = {
        "use_bidirectional_attention": "vision",
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    }
    model = _gemma4(tokenizer, text, {"standardize": True})
    generator = torch.Generator().manual_seed(0)
    tower = model.model.vision_tower
    tower.std_bias.copy_(torch.randn(tower.std_bias.shape, generator=generator))
    tower.std_scale.copy_(1 + 0.3 * torch.randn(tower.std_scale.shape, generator=generator))
    return model


def gemma4_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    sizes = {"patch_size": PATCH, "pooling_kernel_size": POOL, "max_soft_tokens": MAX_TOKENS}
    return Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(**sizes),
        video_processor=Gemma4VideoProcessor(**sizes),
        tokenizer=tokenizer,
        chat_template=GEMMA4_TEMPLATE,
    )
