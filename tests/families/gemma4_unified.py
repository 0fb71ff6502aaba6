"""Gemma 4 12B: no tower, patches are projected as they are."""

from __future__ import annotations

from transformers import (
    Gemma4UnifiedAudioFeatureExtractor,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedImageProcessor,
    Gemma4UnifiedProcessor,
    Gemma4UnifiedVideoProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.gemma4 import MAX_TOKENS, PATCH, POOL, WINDOW
from tests.families.padded_templates import GEMMA4_NAMED, GEMMA4_TEMPLATE
from tests.families.recipes import HIDDEN, text_config


def gemma4_unified(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    named = {**GEMMA4_NAMED, "video_token": "<|video|>"}
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in named.items()}
    ids["eoa_token_index"] = ids.pop("eoa_token_id")
    text = text_config(
        tokenizer,
        "<turn|>",
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        final_logit_softcapping=30.0,
    )
    vision = {
        "patch_size": PATCH,
        "pooling_kernel_size": POOL,
        "mm_embed_dim": 48,
        "output_proj_dims": 48,
        "mm_posemb_size": MAX_TOKENS * POOL,
    }
    config = Gemma4UnifiedConfig(text_config=text, vision_config=vision, audio_config={"audio_embed_dim": 64}, **ids)
    assert config.text_config.hidden_size == HIDDEN
    return Gemma4UnifiedForConditionalGeneration(config)


def gemma4_unified_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    sizes = {"patch_size": PATCH, "pooling_kernel_size": POOL, "max_soft_tokens": MAX_TOKENS}
    return Gemma4UnifiedProcessor(
        feature_extractor=Gemma4UnifiedAudioFeatureExtractor(),
        image_processor=Gemma4UnifiedImageProcessor(**sizes),
        video_processor=Gemma4UnifiedVideoProcessor(**sizes),
        tokenizer=tokenizer,
        chat_template=GEMMA4_TEMPLATE,
    )
