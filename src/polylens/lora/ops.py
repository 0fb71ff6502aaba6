"""The three ways to compute a layer with deltas, as contracts. Shapes: t rows, i in, o out, r rank.

All define the same result, for every (delta, start, stop) on rows start to stop and for no other row:

    y = x W + bias + scaling · (x Aᵀ) Bᵀ        W (i, o), A (r, i), B (o, r)

`apply_reference` is the definition; the other two are checked against it. Row ranges are disjoint and
ascending. Everything runs without gradients.

Rounding in 16-bit types: `addmm` scales and sums in float32 and rounds once, so the scaling is never
folded into B (which would round it) and the only extra rounding of the factored way is that of y itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polylens.core import Delta
from polylens.lora.routing import DeltaRows


class Scratch:
    """One reusable buffer per (device, dtype), as large as the largest layer weight it was asked for."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def like(self, weight: torch.Tensor) -> torch.Tensor:
        """An uninitialised tensor, shaped as the weight; valid until the next call for device and dtype."""
        key = (weight.device, weight.dtype)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < weight.numel():
            self._buffers.pop(key, None)
            del buffer  # before the larger one is allocated, so that both never exist at once
            buffer = self._buffers[key] = torch.empty(weight.numel(), device=weight.device, dtype=weight.dtype)
        return buffer[: weight.numel()].view(weight.shape)

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def clear(self) -> None:
        self._buffers.clear()


def apply_reference(x_ti: torch.Tensor, y_to: torch.Tensor, rows: Sequence[DeltaRows[Delta]]) -> torch.Tensor:
    """The definition: y plus every delta on its rows. `y_to` is the base layer's output and is not changed."""
    out_to = y_to.clone()
    for delta, start, stop in rows:
        out_to[start:stop] += delta.scaling * ((x_ti[start:stop] @ delta.a.T) @ delta.b.T)
    return out_to


def apply_factored_(x_ti: torch.Tensor, y_to: torch.Tensor, rows: Sequence[DeltaRows[Delta]]) -> None:
    """Add every delta into `y_to` in place, through the rank. Rows of no delta are not touched, bit for bit."""
    num_rows = x_ti.shape[0]
    for delta, start, stop in rows:
        # Slicing costs as much as a small GEMM: not done where it would change nothing.
        whole = stop - start == num_rows
        h_tr = torch.mm(x_ti if whole else x_ti[start:stop], delta.a.t())
        (y_to if whole else y_to[start:stop]).addmm_(h_tr, delta.b.t(), alpha=delta.scaling)


def apply_fused_(
    x_ti: torch.Tensor,
    y_to: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: Sequence[DeltaRows[Delta]],
    scratch: Scratch,
    *,
    in_first: bool = False,
) -> None:
    """Write the whole layer into `y_to`: per delta one GEMM with W + sBA on its rows, else one with W.

    weight: (o, i), or (i, o) with `in_first`. `y_to` (t, o) is contiguous and uninitialised; every row is
    written. One delta on all rows costs exactly one GEMM of the layer's own size.
    """
    done = 0
    built = None
    for delta, start, stop in rows:
        if start > done:
            gemm_(x_ti[done:start], weight, bias, y_to[done:start], in_first)
        if delta is not built:
            fused = scratch.like(weight)
            fuse_(fused, weight, delta.a, delta.b, delta.scaling, in_first)
            built = delta
        gemm_(x_ti[start:stop], fused, bias, y_to[start:stop], in_first)
        done = stop
    if done < x_ti.shape[0]:
        gemm_(x_ti[done:], weight, bias, y_to[done:], in_first)


def fuse_(
    out: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, in_first: bool
) -> None:
    if in_first:
        torch.addmm(weight, a.t(), b.t(), alpha=scaling, out=out)
    else:
        torch.addmm(weight, b, a, alpha=scaling, out=out)


def gemm_(
    x_ti: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y_to: torch.Tensor, in_first: bool
) -> None:
    weight_io = weight if in_first else weight.t()
    if bias is None:
        torch.mm(x_ti, weight_io, out=y_to)
    else:
        torch.addmm(bias, x_ti, weight_io, out=y_to)
