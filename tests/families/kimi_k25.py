"""Kimi K2.5: frames of a video are averaged after the tower; the text model has latent attention and experts."""

from __future__ import annotations

from transformers import (
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    Kimi_K25ImageProcessor,
    Kimi_K25Processor,
    Kimi_K25VideoProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.packed_templates import KIMI_SPECIAL, KIMI_TEMPLATE
from tests.families.recipes import MERGE, PATCH, text_config
from tests.families.tokenizers_and_templates import qwen_tokenizer

MAX_PATCHES = 256

LATENT_ATTENTION = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}


def kimi_k25_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(KIMI_SPECIAL, eos="[EOS]", pad="[PAD]", bos="[BOS]")


def kimi_k25(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        "patch_size": PATCH,
        "pos_emb_height": 8,
        "pos_emb_width": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "merge_kernel_size": [MERGE, MERGE],
    }
    text = text_config(
        tokenizer, "[EOS]", model_type="deepseek_v3", num_key_value_heads=4, **LATENT_ATTENTION, **EXPERTS
    )
    config = Kimi_K25Config(
        text_config=text,
        vision_config=vision,
        projection_hidden_size=32,
        image_token_id=tokenizer.convert_tokens_to_ids("<|media_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|kimi_k25_video_placeholder|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|media_begin|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|media_end|>"),
        tie_word_embeddings=False,
    )
    return Kimi_K25ForConditionalGeneration(config)


def kimi_k25_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    common = {"patch_size": PATCH, "merge_size": MERGE, "max_patches": MAX_PATCHES}
    return Kimi_K25Processor(
        image_processor=Kimi_K25ImageProcessor(**common),
        tokenizer=tokenizer,
        video_processor=Kimi_K25VideoProcessor(**common),
        chat_template=KIMI_TEMPLATE,
    )
