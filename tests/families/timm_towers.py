"""Families whose tower is timm's: FastVLM (convolutions, attention in the last stages) and Perception LM (tiles)."""

from __future__ import annotations

from transformers import (
    CLIPImageProcessor,
    FastVlmConfig,
    FastVlmForConditionalGeneration,
    LlavaProcessor,
    PerceptionLMConfig,
    PerceptionLMForConditionalGeneration,
    PerceptionLMImageProcessor,
    PerceptionLMProcessor,
    PerceptionLMVideoProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.recipes import text_config
from tests.families.squares_templates import CHATML_SPECIAL, LLAMA3_NAMED, LLAMA3_SPECIAL, LLAMA3_TEMPLATE
from tests.families.tokenizers_and_templates import qwen_tokenizer
from tests.families.turns import chatml

FAST_SIDE = 192
FAST_STRIDE = 64
"""Of FastViT: a picture has 3 x 3 tokens."""
TILE = 28
PATCH = 7
POOLING = 2


def fast_vlm_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer((*CHATML_SPECIAL, "<image>"))


def fast_vlm(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    width = 32  # of the last stage; its output has twice as many channels
    tower = {
        "model_type": "timm_wrapper",
        "architecture": "fastvit_mci3",
        "do_pooling": True,
        "hidden_size": 2 * width,
        "model_args": {
            "inference_mode": True,
            "layers": [1, 1, 1, 1, 1],
            "embed_dims": [8, 8, 16, 32, width],
            "mlp_ratios": [2, 2, 2, 2, 2],
        },
    }
    config = FastVlmConfig(
        text_config=text_config(tokenizer, "<|im_end|>", model_type="qwen2"),
        vision_config=tower,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(FAST_SIDE // FAST_STRIDE) ** 2,
    )
    return FastVlmForConditionalGeneration(config)


def fast_vlm_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    images = CLIPImageProcessor(size={"shortest_edge": FAST_SIDE}, crop_size={"height": FAST_SIDE, "width": FAST_SIDE})
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=FAST_STRIDE,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        chat_template=chatml(image="<image>\\n"),
    )


def perception_lm_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(
        LLAMA3_SPECIAL, LLAMA3_NAMED, eos="<|eot_id|>", pad="<|end_of_text|>", bos="<|begin_of_text|>"
    )


def perception_lm(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    tower = {
        "model_type": "timm_wrapper",
        "architecture": "vit_pe_core_large_patch14_336",
        "do_pooling": True,
        "model_args": {
            "depth": 2,
            "embed_dim": 32,
            "num_heads": 2,
            "img_size": [TILE, TILE],
            "patch_size": PATCH,
            "ref_feat_shape": [TILE // PATCH, TILE // PATCH],
            "global_pool": "",
            "init_values": 0.1,
            "use_post_transformer_norm": False,
        },
    }
    config = PerceptionLMConfig(
        text_config=text_config(tokenizer, "<|eot_id|>", model_type="llama", head_dim=8),
        vision_config=tower,
        projector_pooling_ratio=POOLING,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video|>"),
        tie_word_embeddings=False,
    )
    return PerceptionLMForConditionalGeneration(config)


def perception_lm_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return PerceptionLMProcessor(
        image_processor=PerceptionLMImageProcessor(tile_size=TILE, max_num_tiles=2),
        video_processor=PerceptionLMVideoProcessor(size={"height": TILE, "width": TILE}),
        tokenizer=tokenizer,
        patch_size=PATCH,
        pooling_ratio=POOLING,
        chat_template=LLAMA3_TEMPLATE,
    )
