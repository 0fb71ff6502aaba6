"""Families that pack the patches of all pictures in one row dimension: Qwen-VL and its kin."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from tests.families.cohere_compass import cohere_compass, cohere_compass_processor, cohere_compass_tokenizer
from tests.families.ernie4_5_vl_moe import (
    ernie4_5_vl_moe,
    ernie4_5_vl_moe_processor,
    ernie4_5_vl_moe_tokenizer,
)
from tests.families.glm import GLM
from tests.families.hyperclovax_vision_v2 import (
    hyperclovax_tokenizer,
    hyperclovax_vision_v2,
    hyperclovax_vision_v2_processor,
)
from tests.families.kimi_k25 import kimi_k25, kimi_k25_processor, kimi_k25_tokenizer
from tests.families.paddleocr_vl import paddleocr_vl, paddleocr_vl_processor, paddleocr_vl_tokenizer
from tests.families.recipes import HIDDEN, MERGE, PATCH, QWEN_TOWER, Family, mrope, packed_media, qwen_ids, text_config
from tests.families.tokenizers_and_templates import QWEN2_TEMPLATE, QWEN3_TEMPLATE, qwen_tokenizer
from tests.families.video_llama_3 import video_llama_3, video_llama_3_processor


def _qwen2_vl(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        "depth": 3,
        "embed_dim": 32,
        "hidden_size": HIDDEN,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
    }
    config = Qwen2VLConfig(
        text_config=text_config(tokenizer, "<|im_end|>", rope_parameters=mrope(1, 1, 2)),
        vision_config=vision,
        **qwen_ids(tokenizer),
    )
    return Qwen2VLForConditionalGeneration(config)


def _qwen2_5_vl(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        **QWEN_TOWER,
        "window_size": 16,  # pixels: windows of 2 x 2 merged patches
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    }
    config = Qwen2_5_VLConfig(
        text_config=text_config(tokenizer, "<|im_end|>", rope_parameters=mrope(1, 1, 2)),
        vision_config=vision,
        **qwen_ids(tokenizer),
    )
    return Qwen2_5_VLForConditionalGeneration(config)


QWEN3_VISION = {
    **QWEN_TOWER,
    "num_position_embeddings": 16,
}
QWEN3_TEXT = {
    "head_dim": 8,
    "num_hidden_layers": 3,
    "rope_parameters": mrope(2, 1, 1, mrope_interleaved=True),
}
DEEPSTACK = {"deepstack_visual_indexes": [0, 1]}


def _qwen3_vl(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = Qwen3VLConfig(
        text_config=text_config(tokenizer, "<|im_end|>", **QWEN3_TEXT),
        vision_config={**QWEN3_VISION, **DEEPSTACK},
        **qwen_ids(tokenizer),
    )
    return Qwen3VLForConditionalGeneration(config)


def _qwen3_vl_moe(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A dense layer between two of experts."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
    config = Qwen3VLMoeConfig(
        text_config=text_config(tokenizer, "<|im_end|>", **QWEN3_TEXT, **experts),
        vision_config={**QWEN3_VISION, **DEEPSTACK},
        **qwen_ids(tokenizer),
    )
    return Qwen3VLMoeForConditionalGeneration(config)


QWEN3_5_TEXT = {
    "head_dim": 16,  # a quarter of it is rotated
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": mrope(1, 1, 0, mrope_interleaved=True, partial_rotary_factor=0.25),
}


def _qwen3_5(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = Qwen3_5Config(
        text_config=text_config(tokenizer, "<|im_end|>", **QWEN3_5_TEXT),
        vision_config=QWEN3_VISION,
        **qwen_ids(tokenizer),
    )
    return Qwen3_5ForConditionalGeneration(config)


def _qwen3_5_moe(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    config = Qwen3_5MoeConfig(
        text_config=text_config(tokenizer, "<|im_end|>", **QWEN3_5_TEXT, **experts),
        vision_config=QWEN3_VISION,
        **qwen_ids(tokenizer),
    )
    return Qwen3_5MoeForConditionalGeneration(config)


def _qwen(
    processor: type, videos: type, template: str, make_model: Callable[[PreTrainedTokenizerBase], PreTrainedModel]
) -> Family:
    def make_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
        return processor(**packed_media(Qwen2VLImageProcessor, videos), tokenizer=tokenizer, chat_template=template)

    return Family(qwen_tokenizer, make_processor, make_model, QWEN_STOP, takes_videos=True)


QWEN_STOP = ("<|im_end|>", "<|endoftext|>")

PACKED: Mapping[str, Family] = {
    **GLM,
    "qwen2_vl": _qwen(Qwen2VLProcessor, Qwen2VLVideoProcessor, QWEN2_TEMPLATE, _qwen2_vl),
    "qwen2_5_vl": _qwen(Qwen2_5_VLProcessor, Qwen2VLVideoProcessor, QWEN2_TEMPLATE, _qwen2_5_vl),
    "qwen3_vl": _qwen(Qwen3VLProcessor, Qwen3VLVideoProcessor, QWEN3_TEMPLATE, _qwen3_vl),
    "qwen3_vl_moe": _qwen(Qwen3VLProcessor, Qwen3VLVideoProcessor, QWEN3_TEMPLATE, _qwen3_vl_moe),
    "qwen3_5": _qwen(Qwen3VLProcessor, Qwen3VLVideoProcessor, QWEN3_TEMPLATE, _qwen3_5),
    "qwen3_5_moe": _qwen(Qwen3VLProcessor, Qwen3VLVideoProcessor, QWEN3_TEMPLATE, _qwen3_5_moe),
    "cohere_compass": Family(
        cohere_compass_tokenizer,
        cohere_compass_processor,
        cohere_compass,
        ("<|END_OF_TURN_TOKEN|>",),
        takes_videos=True,
    ),
    "hyperclovax_vision_v2": Family(
        hyperclovax_tokenizer, hyperclovax_vision_v2_processor, hyperclovax_vision_v2, QWEN_STOP, takes_videos=True
    ),
    "kimi_k25": Family(
        kimi_k25_tokenizer,
        kimi_k25_processor,
        kimi_k25,
        ("[EOS]", "<|im_end|>"),
        takes_videos=True,
        silent_tokens=("<|media_pad|>", "<|kimi_k25_video_placeholder|>"),
    ),
    "paddleocr_vl": Family(paddleocr_vl_tokenizer, paddleocr_vl_processor, paddleocr_vl, ("</s>",)),
    "video_llama_3": Family(qwen_tokenizer, video_llama_3_processor, video_llama_3, QWEN_STOP, takes_videos=True),
    "ernie4_5_vl_moe": Family(
        ernie4_5_vl_moe_tokenizer,
        ernie4_5_vl_moe_processor,
        ernie4_5_vl_moe,
        ("</s>", "<|end_of_sentence|>"),
        takes_videos=True,
    ),
}
