"""Adapters on few rows by the compiled C kernel: a decode step makes about 900 small products otherwise."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from polylens.lora.ops import apply_factored_
from polylens.native import segment_head, segment_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polylens.core import Delta
    from polylens.lora.routing import DeltaRows
    from polylens.native import Kernels

FEW_ROWS = 8
"""Rows of a segment up to which the kernel is faster: it reads A and B from the processor's cache once a row."""


class FewRowsKernel:
    """`ops.apply_factored_` with the compiled kernel for segments of few rows, and without it for the others."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._heads = _Heads()

    def apply_factored_(self, x_ti: torch.Tensor, y_to: torch.Tensor, rows: Sequence[DeltaRows[Delta]]) -> None:
        if not _is_plain(x_ti) or not _is_plain(y_to):
            apply_factored_(x_ti, y_to, rows)
            return
        few: list[bytes] = []
        many: list[DeltaRows[Delta]] = []
        num_values = 0
        for row in rows:
            delta, start, stop = row
            head = self._heads.of(delta) if stop - start <= FEW_ROWS else None
            if head is None:
                many.append(row)
            else:
                few += (head, segment_rows(start, stop))
                num_values += (stop - start) * delta.a.shape[0]
        if many:
            apply_factored_(x_ti, y_to, many)
        if few:
            self._kernels.factored_(x_ti, y_to, few, num_values)


def _is_plain(x: torch.Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_contiguous()


class _Heads:
    """What the kernel is told of a delta, made once and kept as long as the delta lives; it keeps no delta alive."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[Delta], bytes | None]] = {}

    def of(self, delta: Delta) -> bytes | None:
        """None for factors that the kernel cannot read as they lie."""
        found = self._by_id.get(id(delta))
        if found is not None and found[0]() is delta:
            return found[1]
        return self._add(delta)

    def _add(self, delta: Delta) -> bytes | None:
        key, by_id = id(delta), self._by_id
        readable = _is_plain(delta.a) and _is_plain(delta.b)
        head = segment_head(delta.a, delta.b, delta.scaling) if readable else None
        by_id[key] = (weakref.ref(delta, lambda _: by_id.pop(key, None)), head)
        return head
