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

if TYPE_CHECKING:
    import torch

PIXEL_PREFIX = "pixel_values"
"""transformers names an item's pixel tensor `pixel_values` (images) or `pixel_values_videos`."""


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
    NO_EFFECT = "no_effect"
    """The layer is not called, or nothing it computes reaches the features: a delta on it is moot."""
    UNPROVEN = "unproven"
    """No rule could be proven: only batches in which all items use one adapter are safe."""


PROPORTIONAL_RULES = (RowRule.PATCHES, RowRule.TILES, RowRule.IMAGES, RowRule.TOKENS)
"""Rules that divide the rows of one call among all items."""


class SizedItem(Protocol):
    """What a processed item must tell to have a size (see `polylens.models.processing`)."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]: ...

    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True)
class ItemSize:
    """Size of one media item as an encoder sees it."""

    num_patches: int
    num_tiles: int
    num_tokens: int

    @classmethod
    def of(cls, item: SizedItem) -> ItemSize:
        """Read the size off the item's pixel tensor and token count.

        (patches, d) is one tile of many patches; (tiles, 3, h, w) and (1, tiles, 3, h, w) are tiles, each
        counted as one patch; (images, patches, d) is padded: images count as tiles. Raises RowRuleError
        for any other shape.
        """
        shape = _pixel_shape(item.tensors)
        match len(shape):
            case 2:
                return cls(num_patches=shape[0], num_tiles=1, num_tokens=item.num_tokens)
            case 3:
                return cls(num_patches=shape[0] * shape[1], num_tiles=shape[0], num_tokens=item.num_tokens)
            case 4:
                return cls(num_patches=shape[0], num_tiles=shape[0], num_tokens=item.num_tokens)
            case 5:
                num_tiles = shape[0] * shape[1]
                return cls(num_patches=num_tiles, num_tiles=num_tiles, num_tokens=item.num_tokens)
        raise RowRuleError(f"pixel tensor of shape {shape} has no known layout; expected 2 to 5 dimensions")

    def weight(self, rule: RowRule) -> int:
        """The item's share under a proportional rule."""
        match rule:
            case RowRule.PATCHES:
                return self.num_patches
            case RowRule.TILES:
                return self.num_tiles
            case RowRule.IMAGES:
                return 1
            case RowRule.TOKENS:
                return self.num_tokens
        raise RowRuleError(f"row rule {rule.value!r} gives no shares")


def _pixel_shape(tensors: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    shapes = [tuple(t.shape) for name, t in tensors.items() if name in (PIXEL_PREFIX, f"{PIXEL_PREFIX}_videos")]
    if len(shapes) != 1:
        raise RowRuleError(f"an item needs exactly one pixel tensor; it has the tensors {sorted(tensors)}")
    return shapes[0]


def rows_per_item(
    rule: RowRule, sizes: Sequence[ItemSize], num_rows: int, *, call_index: int = 0, layer: str
) -> list[int]:
    """Divide `num_rows` rows of one call of `layer` among the items, in batch order.

    call_index: how many times the layer was called before in this forward (PER_CALL only). A single item
    owns all rows whatever the rule. Raises RowRuleError when the rule does not explain the row count
    exactly, and for NO_EFFECT and UNPROVEN, which divide nothing.
    """
    if len(sizes) == 1:
        return [num_rows]
    if rule is RowRule.PER_CALL:
        return _rows_of_call(len(sizes), num_rows, call_index, layer)
    if rule not in PROPORTIONAL_RULES:
        raise RowRuleError(
            f"layer {layer}: its {num_rows} rows cannot be divided among {len(sizes)} items (row rule {rule.value!r})"
        )
    return _proportional_rows(rule, [size.weight(rule) for size in sizes], num_rows, layer)


def _rows_of_call(num_items: int, num_rows: int, call_index: int, layer: str) -> list[int]:
    if call_index >= num_items:
        raise RowRuleError(
            f"layer {layer}: call number {call_index + 1} in a batch of {num_items} items (row rule 'per_call')"
        )
    return [num_rows if index == call_index else 0 for index in range(num_items)]


def _proportional_rows(rule: RowRule, weights: Sequence[int], num_rows: int, layer: str) -> list[int]:
    total = sum(weights)
    if total == 0 or any(num_rows * weight % total for weight in weights):
        raise RowRuleError(
            f"layer {layer}: {num_rows} rows do not divide in proportion to {list(weights)} (row rule {rule.value!r})"
        )
    return [num_rows * weight // total for weight in weights]
