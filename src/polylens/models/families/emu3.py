"""Emu 3: pictures become tokens of the vocabulary, by a picture tokenizer that is frozen."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from polylens.core import MediaKind
from polylens.models.families.notes import get_features


def encode(inner: Any, kind: MediaKind, batch: Mapping[str, Tensor]) -> Any:
    """Each picture without the padding to its neighbours' size: its tokens would depend on it."""
    features = []
    for pixels, size in zip(batch["pixel_values"], batch["image_sizes"], strict=True):
        height, width = size.tolist()
        alone = {"pixel_values": pixels[None, :, :height, :width], "image_sizes": size[None]}
        features.extend(get_features(inner, kind, alone).pooler_output)
    return SimpleNamespace(pooler_output=features)
