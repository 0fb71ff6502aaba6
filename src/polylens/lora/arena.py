"""An adapter's tensors in one flat buffer: loading is one copy, evicting frees one allocation."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from polylens.core import Change, with_tensors
from polylens.errors import InternalError

ALIGN_BYTES = 64
"""Every tensor starts on a cache line (and on what vector loads of CPU and GPU kernels want)."""


def pack(
    deltas: Mapping[str, Change], device: torch.device | str | None = None
) -> tuple[torch.Tensor, dict[str, Change]]:
    """Copy all tensors of all changes into one 1-D buffer on `device` (None: where they are); the new ones are views.

    All tensors must have one dtype, and one device if `device` is None, else InternalError. The buffer is
    filled where the tensors are and moved in one copy. Without deltas it is empty.
    """
    tensors = [tensor for delta in deltas.values() for tensor in delta.tensors().values()]
    dtype, source = _common(tensors)
    offsets, total = _layout(tensors, dtype)
    buffer = torch.zeros(total, dtype=dtype, device=source)
    for tensor, offset in zip(tensors, offsets, strict=True):
        buffer[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor)
    buffer = buffer.to(device if device is not None else source)
    views = iter(
        buffer[offset : offset + tensor.numel()].view(tensor.shape)
        for tensor, offset in zip(tensors, offsets, strict=True)
    )
    return buffer, {
        name: with_tensors(delta, {field: next(views) for field in delta.tensors()}) for name, delta in deltas.items()
    }


def _common(tensors: list[torch.Tensor]) -> tuple[torch.dtype, torch.device]:
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    if not kinds:
        return torch.float32, torch.device("cpu")
    if len(kinds) > 1:
        raise InternalError(f"an adapter's tensors differ in dtype or device: {sorted(map(str, kinds))}")
    return kinds.pop()


def _layout(tensors: list[torch.Tensor], dtype: torch.dtype) -> tuple[list[int], int]:
    """Start of every tensor and the length of the whole, in elements."""
    step = max(1, ALIGN_BYTES // dtype.itemsize)
    offsets = []
    end = 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.numel() // step) * step
    return offsets, end
