"""Run the vision encoder (tower and connector) on a batch of media items of any requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polylens.errors import InternalError
from polylens.models.families import FamilyNotes
from polylens.models.features import ItemFeatures, read_features

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from polylens.models.prepared import ProcessedItem


PLAIN = FamilyNotes()
"""The notes of a family with nothing to note."""


def encode(
    inner: Any, items: Sequence[ProcessedItem], *, dtype: torch.dtype, notes: FamilyNotes = PLAIN
) -> list[ItemFeatures]:
    """Encode items of one kind in one call of transformers' own encoder.

    `inner` is the model without its head. Raises InternalError when the encoder returns another number of rows
    than the items have media tokens: features are never given to the wrong item.
    """
    kinds = {item.kind for item in items}
    if len(kinds) != 1:
        raise InternalError(f"an encoder batch must hold items of one kind, got {sorted(kinds)}")
    device = next(inner.parameters()).device
    batch = {name: x.to(device) for name, x in notes.collate([item.tensors for item in items]).items()}
    batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
    output = notes.encode(inner, items[0].kind, batch)
    return (notes.read_features or read_features)(output, [item.num_tokens for item in items])
