"""Triton kernels that add many adapters to a layer's output, a GPU's `ops.apply_factored_`.

Two kernels a layer, whatever the number of adapters and their ranks. *Shrink*: h = x Aᵀ for every segment, in float32,
its sum over the inputs split in SPLITS parts so that a decode step, which has few rows, fills the GPU. *Expand*:
y += scaling · h Bᵀ, the parts of h summed on the way. Segments find their A and B through a table of addresses, so
adapters may lie anywhere and differ in rank. Every element is summed by one program in a fixed order: the same batch
gives the same bits.

Legend: t rows, i inputs, o outputs, r rank, s parts of the shrink's sum.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from polylens.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polylens.core import Delta
    from polylens.lora.routing import DeltaRows

SPLITS = 4
FEW_ROWS, MANY_ROWS = 16, 64
"""Rows of one program: 16 is the least that a tensor core takes, 64 reads A and B less often where rows are many."""
BLOCK_IN, BLOCK_OUT, BLOCK_RANK = 64, 64, 16
TABLE_COLUMNS = tl.constexpr(5)
"""A table's row: address of A, address of B, rank, first row, number of rows. One row of it is one program's rows."""
MAX_TABLES = 4096
"""Tables kept: those of a few hundred layers for the last few batches. A table is some hundred bytes."""


@triton.jit
def _shrink(  # type: ignore[no-untyped-def]  # a kernel: its types are Triton's
    x, h, table, num_in, x_stride, h_stride, h_part_stride,
    ROWS: tl.constexpr, RANKS: tl.constexpr, INS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """h[part] = x Aᵀ over the part's inputs, for one block of rows and one of ranks."""
    entry = table + tl.program_id(0) * TABLE_COLUMNS
    part = tl.program_id(2)
    a = tl.load(entry).to(tl.pointer_type(x.dtype.element_ty))
    rank = tl.load(entry + 2).to(tl.int32)
    first_row = tl.load(entry + 3)
    num_rows = tl.load(entry + 4).to(tl.int32)
    ranks = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    if tl.program_id(1) * RANKS < rank:
        row_is_ours = tl.arange(0, ROWS) < num_rows
        rows = first_row + tl.arange(0, ROWS)
        total = tl.full((ROWS, RANKS), 0.0, dtype=tl.float32)
        for start in range(part * INS, num_in, INS * PARTS):
            ins = start + tl.arange(0, INS)
            in_range = ins < num_in
            x_ti = tl.load(
                x + rows[:, None] * x_stride + ins[None, :], mask=row_is_ours[:, None] & in_range[None, :], other=0.0
            )
            a_ir = tl.load(
                a + ranks[None, :] * num_in + ins[:, None], mask=(ranks < rank)[None, :] & in_range[:, None], other=0.0
            )
            total = tl.dot(x_ti, a_ir, total, input_precision="ieee")
        tl.store(
            h + part * h_part_stride + rows[:, None] * h_stride + ranks[None, :],
            total,
            mask=row_is_ours[:, None] & (ranks < rank)[None, :],
        )


@triton.jit
def _expand(  # type: ignore[no-untyped-def]
    y, h, table, scalings, num_out, y_stride, h_stride, h_part_stride,
    ROWS: tl.constexpr, RANKS: tl.constexpr, OUTS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """y += scaling · (sum of h's parts) Bᵀ for one block of rows and one of outputs."""
    entry = table + tl.program_id(0) * TABLE_COLUMNS
    b = tl.load(entry + 1).to(tl.pointer_type(y.dtype.element_ty))
    rank = tl.load(entry + 2).to(tl.int32)
    first_row = tl.load(entry + 3)
    num_rows = tl.load(entry + 4).to(tl.int32)
    scaling = tl.load(scalings + tl.program_id(0))
    row_is_ours = tl.arange(0, ROWS) < num_rows
    rows = first_row + tl.arange(0, ROWS)
    outs = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    out_mask = row_is_ours[:, None] & (outs < num_out)[None, :]
    total = tl.full((ROWS, OUTS), 0.0, dtype=tl.float32)
    for start in range(0, rank, RANKS):
        ranks = start + tl.arange(0, RANKS)
        h_tr = tl.full((ROWS, RANKS), 0.0, dtype=tl.float32)
        for part in tl.static_range(PARTS):
            h_tr += tl.load(
                h + part * h_part_stride + rows[:, None] * h_stride + ranks[None, :],
                mask=row_is_ours[:, None] & (ranks < rank)[None, :],
                other=0.0,
            )
        b_ro = tl.load(
            b + outs[None, :] * rank + ranks[:, None],
            mask=(ranks < rank)[:, None] & (outs < num_out)[None, :],
            other=0.0,
        )
        total = tl.dot(h_tr.to(y.dtype.element_ty), b_ro, total, input_precision="ieee")
    place = y + rows[:, None] * y_stride + outs[None, :]
    before = tl.load(place, mask=out_mask, other=0.0).to(tl.float32)
    tl.store(place, (before + scaling * total).to(y.dtype.element_ty), mask=out_mask)


class SegmentKernels:
    """`apply_factored_` by the kernels above. Keeps the tables of earlier calls: a decode step repeats the last one's.

    A table holds addresses and no tensors; it is found by these same addresses, so it is right whoever owns them now.
    """

    def __init__(self, max_tables: int = MAX_TABLES) -> None:
        self._max_tables = max_tables
        self._tables: OrderedDict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = OrderedDict()

    def apply_factored_(self, x_ti: torch.Tensor, y_to: torch.Tensor, rows: Sequence[DeltaRows[Delta]]) -> None:
        """As `ops.apply_factored_`; x, y, A and B in one dtype, A and B contiguous, rows of x and y too."""
        rows = [row for row in rows if row.stop > row.start]
        if not rows:
            return
        _check(x_ti, y_to, rows)
        longest = max(row.stop - row.start for row in rows)
        block_rows = FEW_ROWS if longest <= FEW_ROWS else MANY_ROWS
        parts = SPLITS if longest <= FEW_ROWS else 1
        table, scalings = self._table(rows, block_rows, x_ti.device)
        max_rank = max(row.delta.rank for row in rows)
        h = torch.empty(parts, x_ti.shape[0], max_rank, dtype=torch.float32, device=x_ti.device)
        blocks = table.shape[0]
        _shrink[(blocks, triton.cdiv(max_rank, BLOCK_RANK), parts)](
            x_ti, h, table, x_ti.shape[1], x_ti.stride(0), h.stride(1), h.stride(0),
            ROWS=block_rows, RANKS=BLOCK_RANK, INS=BLOCK_IN, PARTS=parts,
        )  # fmt: skip
        _expand[(blocks, triton.cdiv(y_to.shape[1], BLOCK_OUT))](
            y_to, h, table, scalings, y_to.shape[1], y_to.stride(0), h.stride(1), h.stride(0),
            ROWS=block_rows, RANKS=BLOCK_RANK, OUTS=BLOCK_OUT, PARTS=parts,
        )  # fmt: skip

    def _table(
        self, rows: Sequence[DeltaRows[Delta]], block_rows: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(blocks, 5) int64 and (blocks,) float32 on the device: where each block of rows finds its adapter."""
        addresses = tuple(
            (delta.a.data_ptr(), delta.b.data_ptr(), delta.rank, delta.scaling, start, stop)
            for delta, start, stop in rows
        )
        key = (device, block_rows, addresses)
        found = self._tables.get(key)
        if found is None:
            blocks = [
                ((a, b, rank, first, min(block_rows, stop - first)), scaling)
                for a, b, rank, scaling, start, stop in addresses
                for first in range(start, stop, block_rows)
            ]
            found = (
                torch.tensor([entry for entry, _ in blocks], dtype=torch.int64).to(device),
                torch.tensor([scaling for _, scaling in blocks], dtype=torch.float32).to(device),
            )
            self._tables[key] = found
            if len(self._tables) > self._max_tables:
                self._tables.popitem(last=False)
        else:
            self._tables.move_to_end(key)
        return found


def _check(x_ti: torch.Tensor, y_to: torch.Tensor, rows: Sequence[DeltaRows[Delta]]) -> None:
    """The kernels read memory by address: what does not fit must not get there."""
    if x_ti.stride(1) != 1 or y_to.stride(1) != 1 or x_ti.dtype is not y_to.dtype:
        raise InternalError("the segment kernels need rows without gaps, and one dtype for inputs and outputs")
    for delta, start, stop in rows:
        a, b = delta.a, delta.b
        fits = a.shape[1] == x_ti.shape[1] and b.shape == (y_to.shape[1], a.shape[0]) and stop <= x_ti.shape[0]
        plain = a.is_contiguous() and b.is_contiguous() and a.dtype is b.dtype is x_ti.dtype
        if not (fits and plain and start >= 0 and a.device == b.device == x_ti.device):
            raise InternalError(f"the delta of {delta.layer} does not fit rows {start} to {stop} of its layer")
