"""Adapters on few rows by the compiled C kernel: a decode step makes about 900 small products otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polylens.lora.ops import apply_factored_

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

    def apply_factored_(self, x_ti: torch.Tensor, y_to: torch.Tensor, rows: Sequence[DeltaRows[Delta]]) -> None:
        few = [row for row in rows if row.stop - row.start <= FEW_ROWS]
        if not few or not _is_plain(x_ti) or not _is_plain(y_to):
            apply_factored_(x_ti, y_to, rows)
            return
        if len(few) < len(rows):
            apply_factored_(x_ti, y_to, [row for row in rows if row.stop - row.start > FEW_ROWS])
        self._kernels.factored_(
            x_ti,
            y_to,
            [(delta.a.contiguous(), delta.b.contiguous(), delta.scaling, start, stop) for delta, start, stop in few],
        )


def _is_plain(x: torch.Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_contiguous()
