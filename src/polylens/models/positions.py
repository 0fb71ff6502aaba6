"""Rotary positions of a prompt, as the model's own code computes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from polylens.core import MediaKind
from polylens.models.families import TwoWay

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polylens.models.prepared import PreparedPrompt, ProcessedItem

_TOKEN_TYPES = {MediaKind.IMAGE: 1, MediaKind.VIDEO: 2}
"""transformers' `mm_token_type_ids`; text is 0."""


def prompt_positions(inner: Any, prompt: PreparedPrompt, first_position: int = 0) -> tuple[torch.Tensor, int]:
    """Positions of the prompt's tokens and the offset of those that follow.

    Returns (positions, delta): positions (3, n) for models with multimodal rotary positions (time, height,
    width), else (1, n) counted from `first_position`, on the CPU. The token at index i >= n has position i + delta
    in every row.
    """
    n = len(prompt.token_ids)
    if not hasattr(inner, "get_rope_index"):
        return torch.arange(n)[None] + first_position, first_position
    ids = torch.tensor([prompt.token_ids])
    positions, delta = inner.get_rope_index(
        input_ids=ids, mm_token_type_ids=_token_types(prompt), **_grids(prompt.items)
    )
    return positions[:, 0], int(delta)


def position_rows(inner: Any) -> int:
    """Rows of `prompt_positions`: 3 for multimodal rotary positions, else 1."""
    return 3 if hasattr(inner, "get_rope_index") else 1


def two_way_spans(two_way: TwoWay, prompt: PreparedPrompt) -> tuple[tuple[int, int], ...]:
    """Sorted (start, stop) ranges of the prompt's tokens that see each other in both directions."""
    if two_way is TwoWay.PROMPT:
        return ((0, len(prompt.token_ids)),)
    if two_way is TwoWay.IMAGES:
        return tuple(sorted((start, start + n) for slot in prompt.slots for start, n in slot.positions))
    return ()


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
                merged.setdefault(name, []).append(tensor)
    return {name: torch.cat(parts) for name, parts in merged.items()}
