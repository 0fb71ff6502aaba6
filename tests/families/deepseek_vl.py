"""DeepSeek-VL (with one tower, and with two for two resolutions) and Janus: pictures padded to one square."""

from __future__ import annotations

from typing import Any

from transformers import (
    DeepseekVLConfig,
    DeepseekVLForConditionalGeneration,
    DeepseekVLHybridConfig,
    DeepseekVLHybridForConditionalGeneration,
    DeepseekVLHybridImageProcessor,
    DeepseekVLHybridProcessor,
    DeepseekVLImageProcessor,
    DeepseekVLProcessor,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusImageProcessor,
    JanusProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.anyres import PATCH, SIDE, siglip_vision
from tests.families.recipes import HIDDEN, text_config
from tests.families.squares_templates import (
    DEEPSEEK_NAMED,
    DEEPSEEK_SPECIAL,
    DEEPSEEK_TEMPLATE,
    JANUS_NAMED,
    JANUS_SPECIAL,
    JANUS_TEMPLATE,
)
from tests.families.tokenizers_and_templates import qwen_tokenizer

EOS = "<|end_of_sentence|>"
NUM_IMAGE_TOKENS = (SIDE // PATCH) ** 2
SIZE = {"height": SIDE, "width": SIDE}
HIGH_RES_SIZE = {"height": 2 * SIDE, "width": 2 * SIDE}


def deepseek_vl_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(DEEPSEEK_SPECIAL, DEEPSEEK_NAMED, eos=EOS, pad="<|pad|>", bos="<|begin_of_sentence|>")


def janus_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(JANUS_SPECIAL, JANUS_NAMED, eos=EOS, pad="<|pad|>", bos="<|begin_of_sentence|>")


def _shared(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "text_config": text_config(tokenizer, EOS, model_type="llama", head_dim=8),
        "image_token_id": tokenizer.convert_tokens_to_ids("<image_placeholder>"),
        "tie_word_embeddings": False,
    }


def deepseek_vl(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = DeepseekVLConfig(**_shared(tokenizer), vision_config=siglip_vision(num_hidden_layers=2))
    return DeepseekVLForConditionalGeneration(config)


def deepseek_vl_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return DeepseekVLProcessor(
        image_processor=DeepseekVLImageProcessor(size=SIZE, min_size=PATCH),
        tokenizer=tokenizer,
        num_image_tokens=NUM_IMAGE_TOKENS,
        chat_template=DEEPSEEK_TEMPLATE,
    )


def deepseek_vl_hybrid(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A second tower, SAM's, sees the picture at twice the size; a layer in its middle is taken besides its last."""
    sam = {
        "hidden_size": 32,
        "output_channels": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 2 * SIDE,
        "patch_size": PATCH,
        "window_size": 3,
        "global_attn_indexes": [0],
        "mlp_dim": 64,
    }
    config = DeepseekVLHybridConfig(
        **_shared(tokenizer),
        vision_config=siglip_vision(num_hidden_layers=2),
        high_res_vision_config={"model_type": "sam_vision_model", **sam},
    )
    return DeepseekVLHybridForConditionalGeneration(config)


def deepseek_vl_hybrid_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    images = DeepseekVLHybridImageProcessor(size=SIZE, high_res_size=HIGH_RES_SIZE, min_size=PATCH)
    return DeepseekVLHybridProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        num_image_tokens=NUM_IMAGE_TOKENS,
        chat_template=DEEPSEEK_TEMPLATE,
    )


def janus(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """With its parts that draw pictures, which take no part in an answer of text."""
    vision = {
        "hidden_size": 32,
        "mlp_ratio": 2.0,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
        "projection_dim": HIDDEN,
        "num_image_tokens": NUM_IMAGE_TOKENS,
    }
    drawing = {
        "embed_dim": 8,
        "num_embeddings": 16,
        "latent_channels": 8,
        "base_channels": 32,
        "channel_multiplier": [1, 1],
        "num_res_blocks": 1,
        "projection_dim": HIDDEN,
        "image_token_embed_dim": HIDDEN,
    }
    config = JanusConfig(**_shared(tokenizer), vision_config=vision, vq_config=drawing)
    return JanusForConditionalGeneration(config)


def janus_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return JanusProcessor(
        image_processor=JanusImageProcessor(size=SIZE, min_size=PATCH),
        tokenizer=tokenizer,
        num_image_tokens=NUM_IMAGE_TOKENS,
        use_default_system_prompt=True,
        chat_template=JANUS_TEMPLATE,
    )
