"""Row rules: how the rows of one encoder layer divide among the items of a batch.

An encoder batch holds several media items, and a layer of the tower or connector sees the rows of all
of them in one tensor, item after item. To give each item its own adapter, one must know which rows are
whose. A row rule says so from the items' sizes alone. Which rule a layer obeys is found by
`polylens.models.probe`, never assumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from polylens.errors import RowRuleError
from polylens.models.prepared import pixel_tensors

if TYPE_CHECKING:
    import torch

EXTENTS = ("image_sizes", "target_sizes", "target_sizes_videos")
"""Height and width of each picture, for encoders that pad pictures to one size or pack them in one strip."""


class RowRule(StrEnum):
    """To what the number of rows of an item in a layer is proportional."""

    PATCHES = "patches"
    """Packed encoders: rows per patch of the item."""
    TILES = "tiles"
    """Rows per tile (a fixed-size crop, or a fixed-size picture)."""
    IMAGES = "images"
    """Padded encoders: every item has the same number of rows."""
    TOKENS = "tokens"
    """Rows per output token of the item."""
    PER_CALL = "per_call"
    """The layer is called once per item, in order: call k holds item k's rows only."""
    PER_TILE = "per_tile"
    """The layer is called once per tile, in order: an item of n tiles has the rows of n calls."""
    VIEWS = "views"
    """The layer is called once per view (a pixel tensor of its own): rows per tile of that view."""
    NO_EFFECT = "no_effect"
    """The layer is not called, or nothing it computes reaches the features: a delta on it is moot."""
    UNPROVEN = "unproven"
    """No rule could be proven: only batches in which all items use one adapter are safe."""


def is_strip(kernel: Sequence[int], input_shape: Sequence[int]) -> bool:
    """Whether a patch embedding's input (n, channels, height, width) is one strip of patches side by side, whose rows
    are then the patches (MiniCPM-V)."""
    return len(kernel) == 2 and input_shape[0] == 1 and input_shape[2] == kernel[0] and input_shape[3] > kernel[1]


PROPORTIONAL_RULES = (RowRule.PATCHES, RowRule.TILES, RowRule.IMAGES, RowRule.TOKENS)
"""Rules that divide the rows of any call among all items alike."""

COUNTED_RULES = (RowRule.PER_TILE, RowRule.PER_CALL, RowRule.VIEWS)
"""Rules by which it matters which call of the layer it is."""


class SizedItem(Protocol):
    """What a processed item must tell to have a size (see `polylens.models.prepared`)."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]: ...

    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True)
class ItemSize:
    """Size of one media item as an encoder sees it.

    num_patches: in patches, or in any unit they are proportional to. views: tiles in each pixel tensor, for items
    that have several (a whole picture and its parts); num_tiles is their sum.
    """

    num_patches: int
    num_tiles: int
    num_tokens: int
    views: tuple[int, ...] = ()

    @classmethod
    def of(cls, item: SizedItem) -> ItemSize:
        """Read the size off the item's pixel tensors and token count.

        (patches, d) is one tile of many patches; (tiles, 3, h, w) and (1, tiles, 3, h, w) are tiles, each
        counted as one patch, or by their area where they differ in it; (images, patches, d) is padded: images
        count as tiles, real patches as patches. Raises RowRuleError for any other shape.
        """
        pixels = list(pixel_tensors(item.tensors).values())
        if not pixels:
            raise RowRuleError(f"an item needs a pixel tensor; it has the tensors {sorted(item.tensors)}")
        if len(pixels) > 1:
            views = tuple(_layout(x.shape)[1] for x in pixels)
            return cls(sum(views), sum(views), item.num_tokens, views)
        areas = _areas(item.tensors, pixels[0].shape) or _unpadded(item.tensors, pixels[0].shape)
        patches, tiles = (sum(areas), len(areas)) if areas else _layout(pixels[0].shape)
        return cls(patches, tiles, item.num_tokens)

    def weight(self, rule: RowRule, call_index: int = 0) -> int:
        """The item's share of the rows of a call under a rule that divides calls. `call_index`: for VIEWS."""
        match rule:
            case RowRule.PATCHES:
                return self.num_patches
            case RowRule.TILES:
                return self.num_tiles
            case RowRule.IMAGES:
                return 1
            case RowRule.TOKENS:
                return self.num_tokens
            case RowRule.VIEWS:
                views = self.views or (self.num_tiles,)
                return views[call_index] if call_index < len(views) else 0
        raise RowRuleError(f"row rule {rule.value!r} gives no shares")


def _areas(tensors: Mapping[str, torch.Tensor], shape: Sequence[int]) -> list[int]:
    """Areas of the pictures in a pixel tensor that holds several sizes: padded to one, or side by side in a strip.

    Empty for other layouts, among them those whose extents are of other things (the picture before it was tiled).
    """
    extents = next((tensors[name] for name in EXTENTS if name in tensors), None)
    if extents is None or len(shape) != 4:
        return []
    areas = extents.prod(-1).tolist()
    num_pictures, _, height, width = shape
    padded = len(areas) == num_pictures and extents.amax(0).tolist() == [height, width]
    in_strip = num_pictures == 1 and sum(areas) * height == width
    return areas if padded or in_strip else []


def _unpadded(tensors: Mapping[str, torch.Tensor], shape: Sequence[int]) -> list[int]:
    """Real patches of each picture in a pixel tensor (images, patches, d), if a mask or positions tell."""
    if len(shape) != 3:
        return []
    for name, tensor in tensors.items():
        if name.endswith("attention_mask") and tuple(tensor.shape) == tuple(shape[:2]):
            return tensor.sum(-1).tolist()
        if name.endswith("position_ids") and tuple(tensor.shape[:2]) == tuple(shape[:2]):
            return (tensor != -1).any(-1).sum(-1).tolist()
    return []


def _layout(shape: Sequence[int]) -> tuple[int, int]:
    """Patches and tiles of a pixel tensor."""
    match len(shape):
        case 2:
            return shape[0], 1
        case 3:
            return shape[0] * shape[1], shape[0]
        case 4:
            return shape[0], shape[0]
        case 5:
            return shape[0] * shape[1], shape[0] * shape[1]
    raise RowRuleError(f"pixel tensor of shape {tuple(shape)} has no known layout; expected 2 to 5 dimensions")


def rows_per_item(
    rule: RowRule, sizes: Sequence[ItemSize], num_rows: int, *, call_index: int = 0, layer: str
) -> list[int]:
    """Divide `num_rows` rows of one call of `layer` among the items, in batch order.

    call_index: how many times the layer was called before in this forward (COUNTED_RULES only). A single item
    owns all rows whatever the rule. Raises RowRuleError when the rule does not explain the row count
    exactly, and for NO_EFFECT and UNPROVEN, which divide nothing.
    """
    if len(sizes) == 1:
        return [num_rows]
    if rule is RowRule.PER_CALL:
        return _rows_of_call(range(len(sizes)), sizes, num_rows, call_index, layer)
    if rule is RowRule.PER_TILE:
        owners = [index for index, size in enumerate(sizes) for _ in range(size.num_tiles)]
        return _rows_of_call(owners, sizes, num_rows, call_index, layer)
    if rule not in (*PROPORTIONAL_RULES, RowRule.VIEWS):
        raise RowRuleError(
            f"layer {layer}: its {num_rows} rows cannot be divided among {len(sizes)} items (row rule {rule.value!r})"
        )
    return _proportional_rows(rule, [size.weight(rule, call_index) for size in sizes], num_rows, layer)


def num_calls(rule: RowRule, sizes: Sequence[ItemSize]) -> int:
    """How often a layer is called in one forward over the items, under one of COUNTED_RULES."""
    match rule:
        case RowRule.PER_CALL:
            return len(sizes)
        case RowRule.PER_TILE:
            return sum(size.num_tiles for size in sizes)
    return max(1, *(len(size.views) for size in sizes))


def _rows_of_call(
    owners: Sequence[int], sizes: Sequence[ItemSize], num_rows: int, call_index: int, layer: str
) -> list[int]:
    """All rows to the item whose call it is. owners: item of each call."""
    if call_index >= len(owners):
        raise RowRuleError(
            f"layer {layer}: call number {call_index + 1} in a batch of {len(sizes)} items with {len(owners)} calls"
        )
    return [num_rows if index == owners[call_index] else 0 for index in range(len(sizes))]


def _proportional_rows(rule: RowRule, weights: Sequence[int], num_rows: int, layer: str) -> list[int]:
    total = sum(weights)
    if total == 0 or any(num_rows * weight % total for weight in weights):
        raise RowRuleError(
            f"layer {layer}: {num_rows} rows do not divide in proportion to {list(weights)} (row rule {rule.value!r})"
        )
    return [num_rows * weight // total for weight in weights]
