"""Families whose text attention chooses by content which tokens it sees; transformers' own generation runs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import (
    Dots3NoteConfig,
    Dots3NoteFeatureExtractor,
    Dots3NoteForConditionalGeneration,
    Dots3NoteProcessor,
    Glm5NextConfig,
    Glm5NextForConditionalGeneration,
    Glm5NextImageProcessor,
    Glm5NextProcessor,
    Glm5NextVideoProcessor,
    HYV4VLConfig,
    HYV4VLForConditionalGeneration,
    HYV4VLImageProcessor,
    HYV4VLProcessor,
    HYV4VLVideoProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen2VLImageProcessor,
    Qwen3VLVideoProcessor,
    Qwen4ExpConfig,
    Qwen4ExpForConditionalGeneration,
)

from tests.families.glm import glm_ids, glm_tokenizer
from tests.families.newer_templates import DOTS_SPECIAL, DOTS_TEMPLATE
from tests.families.packed import PACKED, QWEN3_5_TEXT, QWEN3_VISION, QWEN_STOP
from tests.families.packed_templates import GLM_TEMPLATE
from tests.families.recipes import (
    HIDDEN,
    MERGE,
    PATCH,
    SMALL_TOWER,
    Family,
    mrope,
    packed_media,
    qwen_ids,
    text_config,
    token_ids,
)
from tests.families.tokenizers_and_templates import QWEN3_TEMPLATE, qwen_tokenizer

LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
"""Latent attention."""
INDEXER = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 8}
"""Eight tokens are chosen: fewer than any prompt has."""
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
}


def _glm5_next(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Linear attention in turn with chosen tokens, in two residual streams."""
    layers = {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "linear_head_dim": 8,
        "linear_num_heads": 2,
        "hc_mult": 2,
        "index_kpool": 4,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": HIDDEN,
        "projection_intermediate_size": 48,
        "num_heads": 2,
        "image_size": 16,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
    }
    config = Glm5NextConfig(
        text_config=text_config(tokenizer, "<|endoftext|>", **{**LATENT, **INDEXER, **EXPERTS, **layers}),
        vision_config=vision,
        **glm_ids(tokenizer),
    )
    return Glm5NextForConditionalGeneration(config)


def _glm5_next_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    common = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2}
    return Glm5NextProcessor(
        image_processor=Glm5NextImageProcessor(min_image_tokens=1, max_image_tokens=64, **common),
        tokenizer=tokenizer,
        video_processor=Glm5NextVideoProcessor(min_image_tokens=1, max_image_tokens=256, **common),
        chat_template=GLM_TEMPLATE,
    )


def _hy_v4_vl(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    layers = {
        "num_hidden_layers": 3,
        "indexer_types": ["full", "shared", "full"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "qk_rope_head_dim": 8,
        "hc_mult": 2,
        "rope_parameters": mrope(2, 1, 1),
    }
    vision = {
        **SMALL_TOWER,
        "out_hidden_size": HIDDEN,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "max_image_size": 8 * PATCH,
    }
    config = HYV4VLConfig(
        text_config=text_config(tokenizer, "<|im_end|>", **{**LATENT, **INDEXER, **EXPERTS, **layers}),
        vision_config=vision,
        **token_ids(tokenizer, image_token_id="<|image_pad|>", video_token_id="<|video_pad|>"),
    )
    return HYV4VLForConditionalGeneration(config)


def _hy_v4_vl_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return HYV4VLProcessor(
        **packed_media(HYV4VLImageProcessor, HYV4VLVideoProcessor, num_frames=16, temporal_patch_size=1),
        tokenizer=tokenizer,
        chat_template=QWEN3_TEMPLATE,
    )


def _qwen4_exp(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """As Qwen3.5, with chosen tokens, two residual streams and embeddings of token triples in the first layer."""
    layers = {
        **QWEN3_5_TEXT,
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "hc_count": 2,
        "hc_lowrank": 8,
        "ple_layer_ids": [1],
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    config = Qwen4ExpConfig(
        text_config=text_config(tokenizer, "<|im_end|>", **layers),
        vision_config=QWEN3_VISION,
        **qwen_ids(tokenizer),
    )
    return Qwen4ExpForConditionalGeneration(config)


def _dots_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(DOTS_SPECIAL, eos="<|endofresponse|>")


def _dots3_note(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Sliding layers of another shape between those with chosen tokens; experts in the tower too."""
    layers: dict[str, Any] = {
        "num_hidden_layers": 3,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "sliding_window": 12,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "first_k_dense_replace": 1,
        "shared_experts_intermediate_size": 16,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 8,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "patch_size": PATCH,
        "pyramid_num_routed": [-1, 2, 4],
        "adapter_in_dim": 32,
        "adapter_out_dim": HIDDEN,
    }
    audio = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "feature_size": 16,
        "downsample_hidden_size": 4,
        "adapter_input_size": 16,
        "adapter_out_dim": HIDDEN,
    }
    config = Dots3NoteConfig(
        text_config=text_config(tokenizer, "<|endofresponse|>", **{**LATENT, **INDEXER, **EXPERTS, **layers}),
        vision_config=vision,
        audio_config=audio,
        **token_ids(
            tokenizer,
            image_token_id="<|imgpad|>",
            video_token_id="<|video_pad|>",
            audio_token_id="<|audio_comp_pad|>",
        ),
    )
    return Dots3NoteForConditionalGeneration(config)


def _dots3_note_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return Dots3NoteProcessor(
        tokenizer=tokenizer,
        **packed_media(Qwen2VLImageProcessor, Qwen3VLVideoProcessor, temporal_patch_size=1),
        feature_extractor=Dots3NoteFeatureExtractor(feature_size=16),
        chat_template=DOTS_TEMPLATE,
    )


SPARSE: Mapping[str, Family] = {
    "dots3_note": Family(
        _dots_tokenizer, _dots3_note_processor, _dots3_note, ("<|endofresponse|>",), takes_videos=True
    ),
    "glm5_next": Family(
        glm_tokenizer,
        _glm5_next_processor,
        _glm5_next,
        ("<|user|>", "<|endoftext|>"),
        takes_videos=True,
        mixes_kinds=False,
        amplifies_noise=True,
    ),
    "hy_v4_vl": Family(
        qwen_tokenizer, _hy_v4_vl_processor, _hy_v4_vl, ("<|im_end|>", "<|endoftext|>"), takes_videos=True
    ),
    "qwen4_exp": Family(qwen_tokenizer, PACKED["qwen3_5"].make_processor, _qwen4_exp, QWEN_STOP, takes_videos=True),
}
