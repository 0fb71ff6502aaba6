"""LFM3-VL: a tower of convolutions over each frame's patches between attention layers; so is the text model."""

from __future__ import annotations

from transformers import (
    Lfm3VlConfig,
    Lfm3VlForConditionalGeneration,
    Lfm3VlProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen2VLImageProcessor,
    Qwen3VLVideoProcessor,
)

from tests.families.newer_templates import FRAMES_TEMPLATE
from tests.families.recipes import MERGE, PATCH, Family, packed_media, qwen_ids, text_config
from tests.families.tokenizers_and_templates import qwen_tokenizer

WINDOW = 12


def _model(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "layer_types": ["conv", "full_attention", "conv"],
    }
    layers = {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "sliding_attention", "conv"],
        "sliding_window": WINDOW,
        "conv_L_cache": 4,
        "head_dim": 8,
    }
    config = Lfm3VlConfig(
        text_config=text_config(tokenizer, "<|im_end|>", model_type="lfm3", **layers),
        vision_config=vision,
        projector_hidden_size=48,
        **qwen_ids(tokenizer),
    )
    return Lfm3VlForConditionalGeneration(config)


def _processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return Lfm3VlProcessor(
        tokenizer=tokenizer,
        **packed_media(Qwen2VLImageProcessor, Qwen3VLVideoProcessor),
        chat_template=FRAMES_TEMPLATE,
    )


LFM3_VL = Family(qwen_tokenizer, _processor, _model, ("<|im_end|>", "<|endoftext|>"), takes_videos=True)
