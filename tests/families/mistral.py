"""Mistral Small 4 and Large 4: a Pixtral tower over latent attention, experts, queries scaled by position."""

from __future__ import annotations

from typing import Any

from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralLarge4Config,
    MistralLarge4ForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tests.families.pixtral import tower
from tests.families.recipes import MERGE, text_config

_LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}


def small4_text(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
        "partial_rotary_factor": 0.5,
    }
    return text_config(tokenizer, "</s>", q_lora_rank=16, rope_parameters=rope, **_LATENT)


def mistral4(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return Mistral4ForCausalLM(Mistral4Config(**small4_text(tokenizer)))


def mistral3_mistral4(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = Mistral3Config(
        text_config={"model_type": "mistral4", **small4_text(tokenizer)},
        vision_config=tower(),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=MERGE,
        tie_word_embeddings=False,
    )
    return Mistral3ForConditionalGeneration(config)


def mistral_large4(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Every layer sees a few earlier tokens only, chosen by it or by an earlier layer."""
    text = text_config(
        tokenizer,
        "</s>",
        num_hidden_layers=3,
        index_topk=8,
        index_head_dim=8,
        index_n_heads=2,
        indexer_types=["full", "shared", "full"],
        no_rope_layers=[1, 1, 0],
        **_LATENT,
    )
    config = MistralLarge4Config(
        text_config=text,
        vision_config=tower(),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=MERGE,
    )
    return MistralLarge4ForConditionalGeneration(config)
