"""What the text model receives of media items, and how an encoder's output divides among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from polylens.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, eq=False)
class ItemFeatures:
    """What the text model receives of one item.

    rows: (n, d), one row for each of the item's media tokens. deepstack: further (n, d) features that the
    first text layers add at the same tokens (Qwen3-VL); empty for most families.
    """

    rows: torch.Tensor
    deepstack: tuple[torch.Tensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.rows, *self.deepstack))


def read_features(output: Any, counts: Sequence[int]) -> list[ItemFeatures]:
    """Divide transformers' encoder output among items of `counts` media tokens."""
    rows = split_rows(output.pooler_output, counts)
    levels = [split_rows(level, counts) for level in getattr(output, "deepstack_features", None) or ()]
    return [ItemFeatures(rows[i], tuple(level[i] for level in levels)) for i in range(len(counts))]


def split_rows(features: torch.Tensor | Sequence[torch.Tensor], counts: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Features in item order, however the family groups them, as one (n, d) a item. Raises InternalError."""
    return _split(_flatten(features), counts)


def _flatten(features: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """All feature rows in item order, (rows, d), however the family groups them."""
    if isinstance(features, torch.Tensor):
        return features.reshape(-1, features.shape[-1])
    return torch.cat([x.reshape(-1, x.shape[-1]) for x in features])


def _split(rows: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, ...]:
    if rows.shape[0] != sum(counts):
        raise InternalError(f"the encoder returned {rows.shape[0]} rows for {sum(counts)} media tokens")
    return torch.split(rows, list(counts))
