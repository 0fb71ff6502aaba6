"""Molmo 2: which patches a token pools is told by their numbers among all patches of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polylens.models.prepared import PIXEL_PREFIX

_POOLED = "_token_pooling"
"""(tokens, patches of a window), -1 for none."""


def concat_crops(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """All crops one after the other, and patches numbered on."""
    numbered, first = [], 0
    for item in items:
        numbered.append({name: _from(first, x) if name.endswith(_POOLED) else x for name, x in item.items()})
        pixels = next(x for name, x in item.items() if name.startswith(PIXEL_PREFIX))
        first += pixels.shape[0] * pixels.shape[1]
    return {name: torch.cat([item[name] for item in numbered]) for name in numbered[0]}


def _from(first: int, numbers: Tensor) -> Tensor:
    return torch.where(numbers >= 0, numbers + first, numbers)
