"""Videos as frames, each a tile of its own: InternVL, LLaVA-NeXT-Video, LLaVA-OneVision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, cat

from polylens.core import MediaKind
from polylens.models.families.notes import pad_and_concat

VIDEO = "pixel_values_videos"


def concat_frames(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """As `pad_and_concat`, but videos (1, frames, 3, h, w) of any lengths become one, (1, all frames, 3, h, w)."""
    if VIDEO not in items[0]:
        return pad_and_concat(items)
    return {VIDEO: cat([item[VIDEO] for item in items], dim=1)}


def encode_as_pictures(inner: Any, kind: MediaKind, batch: Mapping[str, Tensor]) -> Any:
    """InternVL has no features of videos, only of pictures."""
    pixels = batch["pixel_values"] if kind is MediaKind.IMAGE else batch[VIDEO][0]
    return inner.get_image_features(pixel_values=pixels, return_dict=True)
