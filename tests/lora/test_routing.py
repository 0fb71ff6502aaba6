from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polylens.core import Adapter, Component, LayerKind, LayerSpec
from polylens.errors import InternalError
from polylens.lora.routing import Segment, check_cover, cut, delta_rows, distinct, num_rows, segments
from tests.lora.toys import NO_DIGESTS, make_adapter

LAYER = LayerSpec("layer", Component.LANGUAGE_MODEL, LayerKind.LINEAR, 4, 4)
ONE = make_adapter("one", [LAYER], 1)
TWO = make_adapter("two", [LAYER], 2)
ELSEWHERE = Adapter("elsewhere", "toy", {}, NO_DIGESTS, 0)
OWNERS = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([None, ONE, TWO, ELSEWHERE])), max_size=12)


@settings(deadline=None)
@given(OWNERS)
def test_segments_give_every_row_its_owner_and_are_as_few_as_can_be(owners: list[tuple[int, Adapter | None]]) -> None:
    counts, adapters = [count for count, _ in owners], [adapter for _, adapter in owners]
    routed = segments(counts, adapters)
    rows = [adapter for count, adapter in owners for _ in range(count)]
    assert [segment.adapter for segment in routed for _ in range(segment.start, segment.stop)] == rows
    assert num_rows(routed) == len(rows)
    check_cover(routed)
    assert all(left.adapter is not right.adapter for left, right in itertools.pairwise(routed))


@settings(deadline=None)
@given(OWNERS)
def test_delta_rows_are_the_rows_of_adapters_with_a_delta(owners: list[tuple[int, Adapter | None]]) -> None:
    routed = segments([count for count, _ in owners], [adapter for _, adapter in owners])
    expected = {
        row: adapter.deltas["layer"]
        for row, adapter in enumerate(adapter for count, adapter in owners for _ in range(count))
        if adapter in (ONE, TWO)
    }
    found = delta_rows(routed, "layer")
    assert {row: delta for delta, start, stop in found for row in range(start, stop)} == expected
    assert delta_rows(routed, "another layer") == ()


def test_equal_content_under_two_names_is_not_merged() -> None:
    twin = make_adapter("twin", [LAYER], 1)
    assert len(segments([1, 1], [ONE, twin])) == 2


def test_distinct_counts_the_base_as_one() -> None:
    assert distinct([ONE, None, ONE, None, TWO]) == (ONE, None, TWO)


def test_inconsistent_owners_are_refused() -> None:
    with pytest.raises(InternalError, match="2 row counts for 1"):
        segments([1, 2], [None])
    with pytest.raises(InternalError, match="-1 rows"):
        segments([-1], [None])


@pytest.mark.parametrize(
    "routed",
    [
        (Segment(None, 1, 2),),
        (Segment(None, 0, 2), Segment(ONE, 3, 4)),
        (Segment(None, 0, 2), Segment(ONE, 1, 4)),
        (Segment(None, 0, 0),),
    ],
)
def test_gaps_overlaps_and_empty_segments_are_found(routed: tuple[Segment, ...]) -> None:
    with pytest.raises(InternalError, match="does not follow"):
        check_cover(routed)


@settings(deadline=None)
@given(OWNERS, st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=4))
def test_cut_gives_the_rows_of_the_ranges_their_owners(
    owners: list[tuple[int, Adapter | None]], pairs: list[tuple[int, int]]
) -> None:
    routed = segments([count for count, _ in owners], [adapter for _, adapter in owners])
    rows = [adapter for count, adapter in owners for _ in range(count)]
    ranges = [(min(pair), min(max(pair), len(rows))) for pair in pairs if min(pair) < len(rows)]
    part = cut(routed, ranges)
    check_cover(part)
    expected = [adapter for start, stop in ranges for adapter in rows[start:stop]]
    assert [segment.adapter for segment in part for _ in range(segment.start, segment.stop)] == expected


def test_cut_refuses_rows_that_are_not_there() -> None:
    with pytest.raises(InternalError, match="rows 1 to 4 are not among the 3 rows"):
        cut(segments([3], [ONE]), [(1, 4)])
