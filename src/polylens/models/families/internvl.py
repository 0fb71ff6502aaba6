"""InternVL: a video is its frames, encoded as pictures of one tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, cat

from polylens.core import MediaKind
from polylens.models.families.notes import pad_and_concat


def concat_frames(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """As `pad_and_concat`, but videos (1, frames, 3, h, w) of any lengths become (all frames, 3, h, w)."""
    if "pixel_values_videos" not in items[0]:
        return pad_and_concat(items)
    return {"pixel_values_videos": cat([item["pixel_values_videos"].flatten(0, 1) for item in items])}


def encode(inner: Any, kind: MediaKind, batch: Mapping[str, Tensor]) -> Any:
    pixels = batch["pixel_values" if kind is MediaKind.IMAGE else "pixel_values_videos"]
    return inner.get_image_features(pixel_values=pixels, return_dict=True)
