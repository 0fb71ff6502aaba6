"""Synthetic media items for the probe: noise pictures and videos of unequal sizes, as the processor makes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from polylens.models.row_rules import ItemSize

if TYPE_CHECKING:
    from polylens.models.prepared import PreparedPrompt, ProcessedItem
    from polylens.models.processing import Processing

NUM_ITEMS = 3
"""Items in a probe batch: with two, one rule's remainder more often passes for another's."""

_SIDES = (16, 32, 64, 128, 256, 512)
"""Shorter sides (pixels) to try, smallest first: processors enlarge or crop small pictures to one size."""

_SHAPES = ((1, 1), (1, 2), (3, 1))
"""Height and width of the items in shorter sides: unequal, and in different directions."""

_FRAMES = (2, 4, 2)
"""Frames of the videos: few, and even, as some processors merge frames in pairs."""

_FPS = 2.0

_TILES = (1, 2, 1)
"""How often each item is taken where a processor makes equally many tiles of any picture."""


def synthetic_items(processing: Processing) -> list[list[ProcessedItem]]:
    """One batch of items per kind of media the model takes: pictures, and videos where it has them."""
    large = _picture(processing, _SIDES[-1], NUM_ITEMS - 1)  # it may have tensors that small ones lack: its tiles
    batches = [
        _smallest_unequal(
            lambda side: [_picture(processing, side, index) for index in range(NUM_ITEMS)], large.tensors.keys()
        )
    ]
    if processing.takes_videos and processing.takes_pictures:
        batches.append(_smallest_unequal(lambda side: [_video(processing, side, index) for index in range(NUM_ITEMS)]))
    return [_with_unequal_tiles(batch) for batch in batches]


def _smallest_unequal(make: Callable[[int], list[ProcessedItem]], needed: Collection[str] = ()) -> list[ProcessedItem]:
    """The first batch whose items differ in size; the smallest batch where none does.

    needed: names of tensors that at least two items must have.
    """
    batches = (batch for batch in map(make, _SIDES) if _have(batch, needed))
    first = next(batches)
    if _is_unequal(first) or _is_tiled(first):
        return first
    return next(filter(_is_unequal, batches), first)


def _have(items: Sequence[ProcessedItem], names: Collection[str]) -> bool:
    return all(sum(name in item.tensors for item in items) > 1 for name in names)


def _is_unequal(items: Sequence[ProcessedItem]) -> bool:
    return len({ItemSize.of(item) for item in items}) == len(items)


def _is_tiled(items: Sequence[ProcessedItem]) -> bool:
    return all(size.num_patches == size.num_tiles for size in map(ItemSize.of, items))


def _with_unequal_tiles(items: list[ProcessedItem]) -> list[ProcessedItem]:
    """Where every item has the same number of tiles, repeat items: one picture twice packs like two."""
    if not _is_tiled(items) or len({ItemSize.of(item).num_tiles for item in items}) > 1:
        return items
    return [_packed([item] * count) for item, count in zip(items, _TILES, strict=True)]


def _packed(items: Sequence[ProcessedItem]) -> ProcessedItem:
    tensors = {name: torch.cat([item.tensors[name] for item in items]) for name in items[0].tensors}
    return replace(items[0], tensors=tensors, num_tokens=sum(item.num_tokens for item in items))


def picture_item(processing: Processing, height: int, width: int, seed: int = 0) -> ProcessedItem:
    """A picture of noise, or a video for a model without pictures, as the processor makes it an item. In pixels."""
    return picture_prompt(processing, height, width, seed).items[0]


def picture_prompt(processing: Processing, height: int, width: int, seed: int = 0) -> PreparedPrompt:
    """A prompt of nothing but a picture of noise, or of a video for a model that takes no pictures."""
    if not processing.takes_pictures:
        frames = processing.notes.num_frames or _FRAMES[0]
        return _prompt(processing, {"type": "video", "video": _noise(seed, frames, height, width)})
    return _prompt(processing, {"type": "image", "image": Image.fromarray(_noise(seed, height, width))})


def video_item(processing: Processing, num_frames: int, height: int, width: int, seed: int = 0) -> ProcessedItem:
    """A video of noise, as the processor makes it an item. Sizes in pixels."""
    frames = _noise(seed, num_frames, height, width)
    return _prompt(processing, {"type": "video", "video": frames, "fps": _FPS}).items[0]


def _noise(seed: int, *sizes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*sizes, 3), dtype=np.uint8)


def _picture(processing: Processing, side: int, index: int) -> ProcessedItem:
    height, width = (side * times for times in _SHAPES[index])
    return picture_item(processing, height, width, index)


def _video(processing: Processing, side: int, index: int) -> ProcessedItem:
    height, width = (side * times for times in _SHAPES[index])
    return video_item(processing, _FRAMES[index], height, width, index)


def _prompt(processing: Processing, part: dict[str, Any]) -> PreparedPrompt:
    return processing.prepare([{"role": "user", "content": [part]}])
