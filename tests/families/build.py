"""Tiny checkpoints of the five families with random weights, written as real local folders.

Each folder holds what a published checkpoint holds (config, safetensors, tokenizer, chat template, processor
files) and loads through transformers' Auto classes without a network. Sizes are the smallest that keep each
family's peculiarities: windows and a full-attention block (Qwen2.5-VL), deepstack (Qwen3-VL), sliding and full
layers with bidirectional image spans (Gemma 3), a tower whose last layer is not used (LLaVA 1.5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CLIPImageProcessor,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
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
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from tests.families.tokenizers_and_templates import (
    GEMMA3_TEMPLATE,
    LLAVA_TEMPLATE,
    QWEN2_TEMPLATE,
    QWEN3_TEMPLATE,
    gemma_tokenizer,
    llava_tokenizer,
    qwen_tokenizer,
)

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "llava")
VIDEO_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Families whose processor takes videos; the others get sampled frames as pictures."""

HIDDEN = 32
PATCH = 4
MERGE = 2
MAX_PIXELS = 64 * 64
"""Qwen families: pictures with sides that are multiples of 8 and at most this many pixels keep their size."""


@dataclass(frozen=True)
class _Family:
    make_tokenizer: Callable[[], PreTrainedTokenizerBase]
    make_processor: Callable[[PreTrainedTokenizerBase], ProcessorMixin]
    make_model: Callable[[PreTrainedTokenizerBase], PreTrainedModel]
    stop_tokens: tuple[str, ...]


def build_checkpoint(family: str, folder: str | Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a checkpoint of `family` into `folder` (created) and return it. The same seed, the same bytes."""
    parts = _FAMILIES[family]
    tokenizer = parts.make_tokenizer()
    model = parts.make_model(tokenizer).eval()
    _randomise(model, seed)
    model.generation_config = _generation_config(tokenizer, parts.stop_tokens)
    folder = Path(folder)
    model.to(dtype).save_pretrained(folder)
    parts.make_processor(tokenizer).save_pretrained(folder)
    return folder


def _randomise(model: PreTrainedModel, seed: int) -> None:
    """Random in every parameter, sized so that pictures matter and greedy answers vary.

    transformers' own initialisation (0.02, zero biases, unit norms) makes tiny models nearly constant functions,
    which would hide a wrong row or a missing term.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(model.get_input_embeddings().weight)}
    head = model.get_output_embeddings()
    strong_norms = _GEMMA_STRONG_NORMS if model.config.model_type == "gemma3" else ()
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in embeddings:
                parameter.copy_(noise * (1.0 if head.weight is not parameter else 0.25))
            elif parameter.dim() >= 2:
                parameter.copy_(noise * _gain(name) / _fan_in(name, parameter) ** 0.5)
            elif name.endswith("bias"):
                parameter.copy_(noise * 0.1)
            elif name.endswith(strong_norms):  # without it the tied head only repeats one token
                parameter.copy_(3.0 + noise * 0.3)
            elif not name.endswith("weight"):  # CLIP's class embedding
                parameter.copy_(noise)
            else:  # scales of norms: around what they were made with (ones, or zeros for Gemma's 1 + w)
                parameter.add_(noise * 0.1)


_GEMMA_STRONG_NORMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
"""Gemma 3 norms a layer's output before adding it; other families use the first name for another norm."""


def _gain(name: str) -> float:
    return 2.0 if "lm_head" in name else 1.2


def _fan_in(name: str, parameter: torch.Tensor) -> int:
    if name.endswith("mm_input_projection_weight"):  # (in, out), used as x @ w
        return parameter.shape[0]
    return max(1, parameter[0].numel())


def _generation_config(tokenizer: PreTrainedTokenizerBase, stop_tokens: tuple[str, ...]) -> GenerationConfig:
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.convert_tokens_to_ids(token) for token in stop_tokens],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )


def _vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Rounded up, as published checkpoints have it: the last ids belong to no token."""
    return -(-(len(tokenizer) + 1) // 32) * 32


def _text(tokenizer: PreTrainedTokenizerBase, eos: str, **more: Any) -> dict[str, Any]:
    """Grouped-query attention: 4 query heads over 2 key heads of 8."""
    shape = {
        "vocab_size": _vocab_size(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.convert_tokens_to_ids(eos),
        "pad_token_id": tokenizer.pad_token_id,
    }
    return {**shape, **more}


def _qwen_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    named = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {field: tokenizer.convert_tokens_to_ids(token) for field, token in named.items()}


def _mrope(*sections: int, **more: Any) -> dict[str, Any]:
    """Sections (time, height, width) sum to half the head size."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **more}


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
        text_config=_text(tokenizer, "<|im_end|>", rope_parameters=_mrope(1, 1, 2)),
        vision_config=vision,
        **_qwen_ids(tokenizer),
    )
    return Qwen2VLForConditionalGeneration(config)


def _qwen2_5_vl(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": HIDDEN,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "window_size": 16,  # pixels: windows of 2 x 2 merged patches
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    }
    config = Qwen2_5_VLConfig(
        text_config=_text(tokenizer, "<|im_end|>", rope_parameters=_mrope(1, 1, 2)),
        vision_config=vision,
        **_qwen_ids(tokenizer),
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": HIDDEN,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    }
    config = Qwen3VLConfig(
        text_config=_text(
            tokenizer,
            "<|im_end|>",
            head_dim=8,
            num_hidden_layers=3,
            rope_parameters=_mrope(2, 1, 1, mrope_interleaved=True),
        ),
        vision_config=vision,
        **_qwen_ids(tokenizer),
    )
    return Qwen3VLForConditionalGeneration(config)


GEMMA_IMAGE = 56
GEMMA_TOKENS_PER_IMAGE = 16
GEMMA_WINDOW = 8
"""Shorter than an image's tokens: masks that mix up windows and bidirectional spans show."""


def _gemma3(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": GEMMA_IMAGE,
        "patch_size": 7,
        "vision_use_head": False,
    }
    config = Gemma3Config(
        text_config=_text(
            tokenizer,
            "<eos>",
            head_dim=8,
            num_hidden_layers=3,
            sliding_window=GEMMA_WINDOW,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            query_pre_attn_scalar=8,
        ),
        vision_config=vision,
        mm_tokens_per_image=GEMMA_TOKENS_PER_IMAGE,
        image_token_index=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
        eos_token_id=[tokenizer.convert_tokens_to_ids(token) for token in ("<eos>", "<end_of_turn>")],
    )
    return Gemma3ForConditionalGeneration(config)


LLAVA_PATCH = 7


def _llava(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": LLAVA_PATCH,
        "projection_dim": 32,
    }
    config = LlavaConfig(
        text_config=_text(tokenizer, "</s>", model_type="llama", head_dim=8),
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(28 // LLAVA_PATCH) ** 2,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    return LlavaForConditionalGeneration(config)


def _qwen_image_processor() -> Qwen2VLImageProcessor:
    size = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": MAX_PIXELS}
    return Qwen2VLImageProcessor(patch_size=PATCH, merge_size=MERGE, temporal_patch_size=2, size=size)


def _qwen_video_processor(cls: type) -> Any:
    size = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": MAX_PIXELS * 8}
    return cls(patch_size=PATCH, merge_size=MERGE, temporal_patch_size=2, size=size)


def _qwen_processor(cls: type, video_cls: type, template: str) -> Callable[[PreTrainedTokenizerBase], ProcessorMixin]:
    def make(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
        return cls(
            image_processor=_qwen_image_processor(),
            tokenizer=tokenizer,
            video_processor=_qwen_video_processor(video_cls),
            chat_template=template,
        )

    return make


def _gemma3_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    half = [0.5, 0.5, 0.5]
    images = Gemma3ImageProcessor(size={"height": GEMMA_IMAGE, "width": GEMMA_IMAGE}, image_mean=half, image_std=half)
    return Gemma3Processor(
        image_processor=images,
        tokenizer=tokenizer,
        chat_template=GEMMA3_TEMPLATE,
        image_seq_length=GEMMA_TOKENS_PER_IMAGE,
    )


def _llava_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    images = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=LLAVA_PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=LLAVA_TEMPLATE,
    )


_QWEN_STOP = ("<|im_end|>", "<|endoftext|>")

_FAMILIES: Mapping[str, _Family] = {
    "qwen2_vl": _Family(
        qwen_tokenizer,
        _qwen_processor(Qwen2VLProcessor, Qwen2VLVideoProcessor, QWEN2_TEMPLATE),
        _qwen2_vl,
        _QWEN_STOP,
    ),
    "qwen2_5_vl": _Family(
        qwen_tokenizer,
        _qwen_processor(Qwen2_5_VLProcessor, Qwen2VLVideoProcessor, QWEN2_TEMPLATE),
        _qwen2_5_vl,
        _QWEN_STOP,
    ),
    "qwen3_vl": _Family(
        qwen_tokenizer,
        _qwen_processor(Qwen3VLProcessor, Qwen3VLVideoProcessor, QWEN3_TEMPLATE),
        _qwen3_vl,
        _QWEN_STOP,
    ),
    "gemma3": _Family(gemma_tokenizer, _gemma3_processor, _gemma3, ("<eos>", "<end_of_turn>")),
    "llava": _Family(llava_tokenizer, _llava_processor, _llava, ("</s>",)),
}
