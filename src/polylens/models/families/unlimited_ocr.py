"""Unlimited-OCR: its encoder takes the numbers of a picture's tiles as lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from polylens.core import MediaKind

LISTS = ("num_local_patches", "patches_grid")


def encode(inner: Any, _: MediaKind, batch: Mapping[str, Tensor]) -> Any:
    """The processor's lists, which an item has as tensors (1,) and (1, 2), are lists again."""
    taken = {name: x.tolist() if name in LISTS else x for name, x in batch.items()}
    return inner.get_image_features(**taken, return_dict=True)
