"""Row rules are pure arithmetic: tested exhaustively on counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polylens.errors import RowRuleError
from polylens.models.row_rules import (
    COUNTED_RULES,
    PROPORTIONAL_RULES,
    ItemSize,
    RowRule,
    num_calls,
    rows_per_item,
)

SIZES = [ItemSize(16, 1, 4), ItemSize(32, 1, 8), ItemSize(60, 1, 15)]


@pytest.mark.parametrize(
    ("rule", "num_rows", "expected"),
    [
        (RowRule.PATCHES, 108, [16, 32, 60]),
        (RowRule.PATCHES, 27, [4, 8, 15]),
        (RowRule.TOKENS, 27, [4, 8, 15]),
        (RowRule.TOKENS, 108, [16, 32, 60]),
        (RowRule.TILES, 108, [36, 36, 36]),
        (RowRule.IMAGES, 108, [36, 36, 36]),
        (RowRule.PATCHES, 0, [0, 0, 0]),
    ],
)
def test_proportional(rule: RowRule, num_rows: int, expected: list[int]) -> None:
    assert rows_per_item(rule, SIZES, num_rows, layer="x") == expected


def test_tiles_are_weighted() -> None:
    sizes = [ItemSize(1, 1, 4), ItemSize(3, 3, 12)]
    assert rows_per_item(RowRule.TILES, sizes, 4 * 5, layer="x") == [5, 15]
    assert rows_per_item(RowRule.IMAGES, sizes, 4 * 5, layer="x") == [10, 10]


def test_per_call_gives_one_item_all_rows() -> None:
    assert rows_per_item(RowRule.PER_CALL, SIZES, 8, call_index=1, layer="x") == [0, 8, 0]
    with pytest.raises(RowRuleError, match="call number 4"):
        rows_per_item(RowRule.PER_CALL, SIZES, 8, call_index=3, layer="x")


def test_views_are_counted_by_call() -> None:
    sizes = [ItemSize(3, 3, 9, (1, 2)), ItemSize(1, 1, 3), ItemSize(5, 5, 15, (1, 4))]
    assert rows_per_item(RowRule.VIEWS, sizes, 12, call_index=0, layer="x") == [4, 4, 4]
    assert rows_per_item(RowRule.VIEWS, sizes, 12, call_index=1, layer="x") == [4, 0, 8]
    with pytest.raises(RowRuleError, match="x: 12 rows"):
        rows_per_item(RowRule.VIEWS, sizes, 12, call_index=2, layer="x")
    assert [num_calls(rule, sizes) for rule in COUNTED_RULES] == [9, 3, 2]


def test_per_tile_gives_an_item_as_many_calls_as_it_has_tiles() -> None:
    sizes = [ItemSize(40, 1, 4), ItemSize(90, 3, 9)]
    calls = [rows_per_item(RowRule.PER_TILE, sizes, 8, call_index=index, layer="x") for index in range(4)]
    assert calls == [[8, 0], [0, 8], [0, 8], [0, 8]]
    with pytest.raises(RowRuleError, match=r"call number 5 .* 4 calls"):
        rows_per_item(RowRule.PER_TILE, sizes, 8, call_index=4, layer="x")


@pytest.mark.parametrize("rule", list(RowRule))
def test_a_single_item_owns_every_row(rule: RowRule) -> None:
    assert rows_per_item(rule, SIZES[:1], 7, call_index=5, layer="x") == [7]


@pytest.mark.parametrize("rule", PROPORTIONAL_RULES)
def test_a_remainder_is_refused(rule: RowRule) -> None:
    with pytest.raises(RowRuleError, match=r"model\.blk: 109 rows"):
        rows_per_item(rule, SIZES, 109, layer="model.blk")


@pytest.mark.parametrize("rule", [RowRule.NO_EFFECT, RowRule.UNPROVEN])
def test_rules_that_divide_nothing(rule: RowRule) -> None:
    with pytest.raises(RowRuleError, match="cannot be divided"):
        rows_per_item(rule, SIZES, 108, layer="x")


def test_zero_weights_are_refused() -> None:
    with pytest.raises(RowRuleError):
        rows_per_item(RowRule.TOKENS, [ItemSize(4, 1, 0)] * 2, 8, layer="x")


@given(
    st.sampled_from(PROPORTIONAL_RULES),
    st.lists(st.tuples(*[st.integers(1, 300)] * 3), min_size=2, max_size=8),
    st.integers(0, 10_000),
)
def test_shares_are_exact_or_refused(rule: RowRule, sizes: list[tuple[int, int, int]], num_rows: int) -> None:
    items = [ItemSize(*size) for size in sizes]
    try:
        rows = rows_per_item(rule, items, num_rows, layer="x")
    except RowRuleError:
        return
    weights = [item.weight(rule) for item in items]
    assert sum(rows) == num_rows
    assert all(row * sum(weights) == num_rows * weight for row, weight in zip(rows, weights, strict=True))


@pytest.mark.parametrize(
    ("shape", "patches", "tiles"),
    [((24, 6), 24, 1), ((5, 3, 8, 8), 5, 5), ((1, 5, 3, 8, 8), 5, 5), ((1, 64, 6), 64, 1)],
)
@pytest.mark.parametrize("name", ["pixel_values", "pixel_values_videos"])
def test_item_size_is_read_from_the_pixel_tensor(name: str, shape: tuple[int, ...], patches: int, tiles: int) -> None:
    item = SimpleNamespace(tensors={name: torch.zeros(shape), "image_grid_thw": torch.ones(1, 3)}, num_tokens=6)
    assert ItemSize.of(item) == ItemSize(patches, tiles, 6)


@pytest.mark.parametrize(
    ("shape", "name", "extents", "size"),
    [
        ((2, 3, 8, 12), "image_sizes", [[8, 4], [4, 12]], ItemSize(80, 2, 6)),  # padded to one size
        ((1, 3, 2, 40), "target_sizes", [[2, 4], [4, 3]], ItemSize(20, 2, 6)),  # a strip of patches
        ((2, 3, 8, 12), "image_sizes", [[30, 70]], ItemSize(2, 2, 6)),  # of the picture before it was tiled
        ((1, 2, 3, 8, 8), "image_sizes", [[8, 8]], ItemSize(2, 2, 6)),
    ],
)
def test_pictures_of_several_sizes_count_by_area(
    shape: tuple[int, ...], name: str, extents: list[list[int]], size: ItemSize
) -> None:
    tensors = {"pixel_values": torch.zeros(shape), name: torch.tensor(extents)}
    assert ItemSize.of(SimpleNamespace(tensors=tensors, num_tokens=6)) == size


def test_each_pixel_tensor_is_a_view() -> None:
    tensors = {"pixel_values": torch.zeros(1, 3, 8, 8), "pixel_values_local": torch.zeros(4, 3, 6, 6)}
    assert ItemSize.of(SimpleNamespace(tensors=tensors, num_tokens=6)) == ItemSize(5, 5, 6, (1, 4))


def test_items_without_known_pixels_are_refused() -> None:
    with pytest.raises(RowRuleError, match="needs a pixel tensor"):
        ItemSize.of(SimpleNamespace(tensors={"x": torch.zeros(2, 2)}, num_tokens=1))
    with pytest.raises(RowRuleError, match="no known layout"):
        ItemSize.of(SimpleNamespace(tensors={"pixel_values": torch.zeros(2)}, num_tokens=1))
