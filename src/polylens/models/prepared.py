"""A request's prompt as the engine takes it: token ids, processed media, and the places where features go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polylens.core import MediaKind

PIXEL_PREFIX = "pixel_values"
"""transformers names an item's pixel tensors `pixel_values`, `pixel_values_videos`, `pixel_values_local`."""


def pixel_tensors(outputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The pixels among a processor's outputs: one tensor, or one of the whole picture and one of its parts."""
    return {name: x for name, x in outputs.items() if name.startswith(PIXEL_PREFIX) and isinstance(x, torch.Tensor)}


@dataclass(frozen=True, eq=False)
class ProcessedItem:
    """One media item as the encoder takes it, processed alone.

    tensors: the arguments of `get_image_features`/`get_video_features`, e.g. `pixel_values` (P, d) and
    `image_grid_thw` (1, 3), or `pixel_values` (T, 3, h, w). num_tokens: its media tokens in the prompt, which is
    the number of feature rows. extras: tensors (1,) that positions need (`second_per_grid_ts`).
    """

    kind: MediaKind
    media_key: str
    settings_key: str
    tensors: dict[str, torch.Tensor]
    num_tokens: int
    extras: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


@dataclass(frozen=True)
class MediaSlot:
    """Where the features of `items[item_index]` go: runs (start, length) of token positions, in row order."""

    item_index: int
    positions: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt ready for the engine. Items and slots are in the order of their places in `token_ids`.

    inputs: instead of items and slots, all that the processor returned beside the ids, for transformers' own
    generation.
    """

    token_ids: list[int]
    items: list[ProcessedItem] = field(default_factory=list)
    slots: list[MediaSlot] = field(default_factory=list)
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
