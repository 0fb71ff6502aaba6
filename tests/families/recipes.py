"""Parts that the builds of several families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

HIDDEN = 32
PATCH = 4
MERGE = 2
MAX_PIXELS = 64 * 64
"""Qwen families: pictures with sides that are multiples of 8 and at most this many pixels keep their size."""


@dataclass(frozen=True)
class Family:
    """How one family's checkpoint is made.

    seed: of the random weights; of some, float32 itself is off by more than what counts as equal.
    takes_videos: whether its processor does. stacks_videos: whether it takes several in a request only if they have
    equally many frames; stacks_pictures: the same of pictures and tiles. needs_picture: whether it refuses a request
    without one. takes_turns: whether it takes earlier answers. several_videos: whether it takes more than one in a
    request. mixes_kinds: whether transformers' own forward takes pictures and videos in one prompt. lacks: parts
    without a linear layer, "tower" or "connector". one_picture: whether a request has one at most.
    only_videos_of: frames of the one video that a request has, where it has no pictures. max_model_len: to be
    given where the config names none. silent_tokens: never answered: where a model answers with a media token,
    transformers puts the first picture's first feature in its place.
    amplifies_noise: whether differences as small as float32's grow beyond what counts as equal in it; then only deltas
    fused into the weights are compared, which round as merged weights do.
    """

    make_tokenizer: Callable[[], PreTrainedTokenizerBase]
    make_processor: Callable[[PreTrainedTokenizerBase], ProcessorMixin]
    make_model: Callable[[PreTrainedTokenizerBase], PreTrainedModel]
    stop_tokens: tuple[str, ...]
    seed: int = 0
    takes_videos: bool = False
    stacks_videos: bool = False
    stacks_pictures: bool = False
    needs_picture: bool = False
    takes_turns: bool = True
    several_videos: bool = True
    mixes_kinds: bool = True
    lacks: tuple[str, ...] = ()
    one_picture: bool = False
    only_videos_of: int | None = None
    max_model_len: int | None = None
    amplifies_noise: bool = False
    silent_tokens: tuple[str, ...] = ()


def vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Rounded up, as published checkpoints have it: the last ids belong to no token."""
    return -(-(len(tokenizer) + 1) // 32) * 32


def text_config(tokenizer: PreTrainedTokenizerBase, eos: str, **more: Any) -> dict[str, Any]:
    """Grouped-query attention: 4 query heads over 2 key heads of 8."""
    shape = {
        "vocab_size": vocab_size(tokenizer),
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


SMALL_TOWER: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
QWEN_TOWER: Mapping[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": HIDDEN,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
}


def packed_media(images: type, videos: type, *, num_frames: int = 8, **more: Any) -> dict[str, Any]:
    """The parts of a processor for packed patches: pictures of up to MAX_PIXELS, videos of `num_frames` times that."""
    shape = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2, **more}
    least = (PATCH * MERGE) ** 2
    return {
        "image_processor": images(size={"shortest_edge": least, "longest_edge": MAX_PIXELS}, **shape),
        "video_processor": videos(size={"shortest_edge": least, "longest_edge": num_frames * MAX_PIXELS}, **shape),
    }


def token_ids(tokenizer: PreTrainedTokenizerBase, **named: str) -> dict[str, int]:
    """Fields of a config that are the ids of these tokens."""
    return {field: tokenizer.convert_tokens_to_ids(token) for field, token in named.items()}


def qwen_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    return token_ids(
        tokenizer,
        image_token_id="<|image_pad|>",
        video_token_id="<|video_pad|>",
        vision_start_token_id="<|vision_start|>",
        vision_end_token_id="<|vision_end|>",
    )


def mrope(*sections: int, **more: Any) -> dict[str, Any]:
    """Sections (time, height, width) sum to half the head size."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **more}
