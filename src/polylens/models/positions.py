"""Rotary positions of a prompt, as the model's own code computes them."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from polylens.core import MediaKind
from polylens.models.families import TwoWay
from polylens.models.prepared import PreparedPrompt

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from polylens.models.prepared import ProcessedItem

_ARGUMENTS = {"video_second_per_grid": "second_per_grids"}
"""What `get_rope_index` calls what a processor returned, where the names differ (Qwen Omni)."""

_TOKEN_TYPES = {MediaKind.IMAGE: 1, MediaKind.VIDEO: 2}
"""transformers' `mm_token_type_ids`; text is 0."""


def prompt_positions(inner: Any, prompt: PreparedPrompt, first_position: int = 0) -> tuple[torch.Tensor, float]:
    """Positions of the prompt's tokens and the offset of those that follow.

    Returns (positions, delta): positions (3, n) for models with multimodal rotary positions (time, height,
    width, or as many as the model has), else (1, n) counted from `first_position`, on the CPU. The token at index
    i >= n has position i + delta in every row. Both are whole numbers, except in families that count seconds.
    """
    n = len(prompt.token_ids)
    if not hasattr(inner, "get_rope_index"):
        return torch.arange(n)[None] + first_position, first_position
    ids = torch.tensor([prompt.token_ids])
    taken = inspect.signature(inner.get_rope_index).parameters
    told = {"mm_token_type_ids": _token_types(prompt), "attention_mask": torch.ones_like(ids)}
    positions, delta = inner.get_rope_index(
        input_ids=ids, **{name: x for name, x in told.items() if name in taken}, **_grids(prompt.items)
    )
    return positions[:, 0], delta.item()


def position_rows(inner: Any) -> int:
    """Rows of `prompt_positions`: 1 without multimodal rotary positions."""
    positions, _ = prompt_positions(inner, PreparedPrompt([0]))
    return positions.shape[0]


Ranges = tuple[tuple[int, int], ...]
"""Sorted (start, stop) ranges of tokens."""


def two_way_spans(two_way: TwoWay, prompt: PreparedPrompt, block_ids: Collection[int] = ()) -> Ranges:
    """Ranges of the prompt's tokens that see each other in both directions.

    block_ids: of the tokens that do where it is those of all images; the one range has others between, `span_holes`.
    """
    if two_way is TwoWay.PROMPT:
        return ((0, len(prompt.token_ids)),)
    if two_way is TwoWay.IMAGES:
        return tuple(sorted((start, start + n) for slot in prompt.slots for start, n in slot.positions))
    if two_way is TwoWay.ALL_IMAGES and prompt.items:
        blocks = _runs_of(prompt.token_ids, block_ids)
        return ((blocks[0][0], blocks[-1][1]),)
    return ()


def span_holes(two_way: TwoWay, prompt: PreparedPrompt, block_ids: Collection[int]) -> Ranges:
    """Ranges within the spans whose tokens see earlier ones only, and are seen by later ones only."""
    if two_way is not TwoWay.ALL_IMAGES or not prompt.items:
        return ()
    return tuple((stop, start) for (_, stop), (start, _) in pairwise(_runs_of(prompt.token_ids, block_ids)))


def _runs_of(token_ids: Sequence[int], wanted: Collection[int]) -> list[tuple[int, int]]:
    edges = [i for i, (a, b) in enumerate(pairwise([False, *(t in wanted for t in token_ids), False])) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _token_types(prompt: PreparedPrompt) -> torch.Tensor:
    types = torch.zeros(1, len(prompt.token_ids), dtype=torch.int)
    for slot in prompt.slots:
        for start, length in slot.positions:
            types[0, start : start + length] = _TOKEN_TYPES[prompt.items[slot.item_index].kind]
    return types


def _grids(items: Sequence[ProcessedItem]) -> dict[str, Any]:
    """The per-item position inputs (grids, seconds per grid), concatenated over the prompt's items."""
    merged: dict[str, list[torch.Tensor]] = {}
    for item in items:
        for name, tensor in {**item.tensors, **item.extras}.items():
            if not name.startswith("pixel_values"):
                merged.setdefault(_ARGUMENTS.get(name, name), []).append(tensor)
    return {name: torch.cat(parts) for name, parts in merged.items()}
