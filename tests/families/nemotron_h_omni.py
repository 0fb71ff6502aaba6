"""Nemotron 3 Omni: pictures packed with tokens of their own before each, over Mamba 2, attention and experts."""

from __future__ import annotations

from transformers import (
    NemotronH_Omni_Reasoning_V3,
    NemotronH_Omni_Reasoning_V3_Config,
    NemotronH_Omni_Reasoning_V3ImageProcessor,
    NemotronH_Omni_Reasoning_V3Processor,
    NemotronH_Omni_Reasoning_V3VideoProcessor,
    ParakeetFeatureExtractor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.recipes import PATCH, text_config
from tests.families.tokenizers_and_templates import qwen_tokenizer
from tests.families.turns import chatml

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<image>",
    "<video>",
    "<img>",
    "</img>",
    "<so_embedding>",
    "<so_start>",
    "<so_end>",
)
TEMPLATE = chatml(answer="<|im_start|>assistant\\n<think></think>", image="<image>\\n", video="<video>\\n")


def nemotron_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(SPECIAL)


def nemotron_h_omni(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    text = text_config(
        tokenizer,
        "<|im_end|>",
        head_dim=8,
        layer_types=["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
        ssm_state_size=8,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
    )
    del text["num_hidden_layers"]
    tower = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "mlp_ratio": 2.0,
        "patch_size": PATCH,
        "max_img_size": 64,
        "video_temporal_patch_size": 2,
    }
    config = NemotronH_Omni_Reasoning_V3_Config(
        text_config=text,
        vision_config=tower,
        audio_config=None,
        projector_hidden_size=48,
        vision_hidden_size=32,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<video>"),
    )
    return NemotronH_Omni_Reasoning_V3(config)


def nemotron_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    images = NemotronH_Omni_Reasoning_V3ImageProcessor(patch_size=PATCH, min_num_patches=16, max_num_patches=96)
    videos = NemotronH_Omni_Reasoning_V3VideoProcessor(
        patch_size=PATCH, video_target_num_patches=32, norm_mean=[0.5, 0.5, 0.5], norm_std=[0.5, 0.5, 0.5]
    )
    return NemotronH_Omni_Reasoning_V3Processor(
        image_processor=images,
        video_processor=videos,
        tokenizer=tokenizer,
        feature_extractor=ParakeetFeatureExtractor(),
        chat_template=TEMPLATE,
    )
