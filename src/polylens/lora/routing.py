"""Routing as pure functions: from owners of consecutive rows to segments, from segments to deltas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from polylens.core import Adapter, Change
from polylens.errors import InternalError


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, stop) of a layer's input, all of one adapter (None: the base model)."""

    adapter: Adapter | None
    start: int
    stop: int


AnyChange = TypeVar("AnyChange", bound=Change)


class DeltaRows(NamedTuple, Generic[AnyChange]):
    """One delta and the rows [start, stop) it applies to. A tuple, because the hot path unpacks it."""

    delta: AnyChange
    start: int
    stop: int


Segments = tuple[Segment, ...]


def segments(counts: Sequence[int], adapters: Sequence[Adapter | None]) -> Segments:
    """Lay `counts[k]` rows of `adapters[k]` one after the other; neighbours of one adapter become one segment.

    The result covers rows 0 to sum(counts) without gaps; owners of zero rows leave no trace.
    Raises InternalError when the two sequences differ in length or a count is negative.
    """
    if len(counts) != len(adapters):
        raise InternalError(f"{len(counts)} row counts for {len(adapters)} owners of rows")
    merged: list[Segment] = []
    row = 0
    for count, adapter in zip(counts, adapters, strict=True):
        if count < 0:
            raise InternalError(f"an owner has {count} rows")
        if count == 0:
            continue
        start = row
        row += count
        if merged and merged[-1].adapter is adapter:
            start = merged.pop().start
        merged.append(Segment(adapter, start, row))
    return tuple(merged)


def cut(routed: Sequence[Segment], ranges: Sequence[tuple[int, int]]) -> Segments:
    """The segments of these [start, stop) ranges of the rows, laid one after the other.

    Raises InternalError for rows that the segments do not cover.
    """
    owners, counts = [], []
    for first, last in ranges:
        parts = [(s.adapter, min(s.stop, last) - max(s.start, first)) for s in routed]
        inside = [(adapter, count) for adapter, count in parts if count > 0]
        if sum(count for _, count in inside) != last - first:
            raise InternalError(f"rows {first} to {last} are not among the {num_rows(routed)} rows of the step")
        owners += [adapter for adapter, _ in inside]
        counts += [count for _, count in inside]
    return segments(counts, owners)


def num_rows(routed: Sequence[Segment]) -> int:
    """Rows covered by segments as `segments` makes them."""
    return routed[-1].stop if routed else 0


def check_cover(routed: Sequence[Segment]) -> None:
    """Raise InternalError unless the segments follow each other from row 0 without gap or overlap."""
    row = 0
    for segment in routed:
        if segment.start != row or segment.stop <= row:
            raise InternalError(f"segment of rows {segment.start} to {segment.stop} does not follow row {row}")
        row = segment.stop


def distinct(adapters: Sequence[Adapter | None]) -> tuple[Adapter | None, ...]:
    """The different owners, the base model (None) counted as one, in order of first appearance."""
    return tuple(dict.fromkeys(adapters))


def delta_rows(routed: Sequence[Segment], layer: str) -> tuple[DeltaRows[Change], ...]:
    """The deltas that `layer` has to add and their rows: segments whose adapter leaves it alone are left out."""
    found = []
    for segment in routed:
        if segment.adapter is not None:
            delta = segment.adapter.deltas.get(layer)
            if delta is not None:
                found.append(DeltaRows(delta, segment.start, segment.stop))
    return tuple(found)
