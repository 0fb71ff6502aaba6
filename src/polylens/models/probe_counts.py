"""What the counts of rows propose: row rules by which every call of a layer can be divided among a batch's items."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polylens.errors import RowRuleError
from polylens.models.row_rules import COUNTED_RULES, PROPORTIONAL_RULES, ItemSize, RowRule, SizedItem, rows_per_item

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polylens.models.probe_features import Features
    from polylens.models.probe_hooks import Calls

MIN_ITEMS = 2
"""A batch of one item divides nothing."""


@dataclass(frozen=True, eq=False)
class Batch:
    """A synthetic batch with what one plain run of it, and of each item alone, showed."""

    items: Sequence[SizedItem]
    sizes: Sequence[ItemSize]
    features: Sequence[Features]
    calls: Calls
    alone_calls: Sequence[Calls]

    @property
    def positions(self) -> range:
        return range(len(self.items))

    @property
    def smallest_two(self) -> Sequence[int]:
        """Positions of the two items with the least pixels: the cheapest batch that can go wrong."""
        pixels = [sum(tensor.numel() for tensor in item.tensors.values()) for item in self.items]
        return sorted(sorted(self.positions, key=pixels.__getitem__)[:MIN_ITEMS])

    def called(self, layer: str) -> bool:
        return bool(self.calls.get(layer)) or any(calls.get(layer) for calls in self.alone_calls)


def propose(layer: str, batches: Sequence[Batch]) -> tuple[tuple[RowRule, ...], str | None]:
    """Rules the counts allow, of which no two divide every batch alike, best first; and if there are none, why."""
    by_division: dict[object, list[RowRule]] = defaultdict(list)
    for rule in _preference(batches):
        divisions = [_division(rule, layer, batch) for batch in batches]
        if None not in divisions:
            by_division[repr(divisions)].append(rule)
    if not by_division:
        return (), "its row counts fit no rule"
    if any({RowRule.PATCHES, RowRule.IMAGES} <= set(rules) for rules in by_division.values()):
        return (), "the synthetic items are equal in size, so they cannot tell one rule from another"
    return tuple(rules[0] for rules in by_division.values()), None


def _preference(batches: Sequence[Batch]) -> tuple[RowRule, ...]:
    """Of rules that say the same about every batch, the one that names the layout plainly comes first."""
    # Items made of tiles, not of patches, may have several of them.
    if all(size.num_patches == size.num_tiles for batch in batches for size in batch.sizes):
        return (RowRule.TILES, RowRule.IMAGES, RowRule.TOKENS, RowRule.PATCHES, *COUNTED_RULES)
    return (RowRule.PATCHES, RowRule.TOKENS, RowRule.IMAGES, RowRule.TILES, *COUNTED_RULES)


def _division(rule: RowRule, layer: str, batch: Batch) -> list[list[int]] | None:
    """Rows per item in each call of the layer under `rule`, or None when the counts rule it out.

    Where the rows of the items alone add up to those of the batch, nothing was padded, and the division must be
    exactly the items' own counts. Where they do not (padding to the largest item), any even division may be right.
    """
    calls = batch.calls.get(layer, [])
    alone = [list(item_calls.get(layer, [])) for item_calls in batch.alone_calls]
    if rule in (RowRule.PER_CALL, RowRule.PER_TILE):
        num_calls = [1 if rule is RowRule.PER_CALL else size.num_tiles for size in batch.sizes]
        fits = list(calls) == [rows for item in alone for rows in item] and num_calls == [len(item) for item in alone]
        return alone if fits else None
    if rule is RowRule.VIEWS:
        if not any(size.views for size in batch.sizes):
            return None
        alone = [item + [0] * (len(calls) - len(item)) for item in alone]  # an item may lack the later views
    elif rule not in PROPORTIONAL_RULES:
        return None
    return _proportional(rule, layer, batch.sizes, calls, alone)


def _proportional(
    rule: RowRule, layer: str, sizes: Sequence[ItemSize], calls: Sequence[int], alone: Sequence[Sequence[int]]
) -> list[list[int]] | None:
    if any(len(item) != len(calls) for item in alone):
        return None
    try:
        divisions = [
            rows_per_item(rule, sizes, num_rows, call_index=index, layer=layer) for index, num_rows in enumerate(calls)
        ]
    except RowRuleError:
        return None
    own_rows = [[item[index] for item in alone] for index in range(len(calls))]
    for num_rows, division, rows in zip(calls, divisions, own_rows, strict=True):
        if sum(rows) == num_rows and division != rows:
            return None
    return divisions
