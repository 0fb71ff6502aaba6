"""LLaVA-OneVision: only a lone picture is cut into tiles; a video's features end with one newline vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, cat

from polylens.core import MediaKind
from polylens.models.families.notes import get_features
from polylens.models.features import ItemFeatures, read_features, split_rows


class OneOfSeveral(int):
    """A count that is one, and not the 1 by which transformers knows a conversation's only picture."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def encode(inner: Any, kind: MediaKind, batch: Mapping[str, Tensor]) -> Any:
    """Pictures of different conversations in one batch: `batch_num_images` says of each whether it was tiled."""
    if kind is MediaKind.VIDEO:
        return get_features(inner, kind, batch)
    counts = [1 if count == 1 else OneOfSeveral(1) for count in batch["batch_num_images"].tolist()]
    return get_features(inner, kind, {**batch, "batch_num_images": counts})  # type: ignore[dict-item]


def read(output: Any, counts: Sequence[int]) -> list[ItemFeatures]:
    """Pictures come as a list. Videos come as one, whose last row is the newline that ends each of them."""
    features = output.pooler_output
    if not isinstance(features, Tensor):
        return read_features(output, counts)
    *videos, newline = split_rows(features, [*(count - 1 for count in counts), 1])
    return [ItemFeatures(cat([rows, newline])) for rows in videos]
