"""Faster ways to do what `lora.ops` defines, each for one kind of device; `choose_factored` picks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from polylens.core import Delta
from polylens.lora.kernels.cpu import FewRowsKernel
from polylens.lora.ops import apply_factored_
from polylens.lora.routing import DeltaRows
from polylens.native import Kernels

ApplyFactored = Callable[[torch.Tensor, torch.Tensor, Sequence[DeltaRows[Delta]]], None]
"""As `ops.apply_factored_`."""


def choose_factored(device: torch.device, kernels: Kernels | None = None) -> ApplyFactored:
    """The fastest `apply_factored_` for this device. kernels: the compiled ones, for a model in float32 on a CPU."""
    if device.type == "cuda":
        # Only here: triton is a large import, and not there on every platform.
        from polylens.lora.kernels.triton_segments import SegmentKernels

        return SegmentKernels().apply_factored_
    return apply_factored_ if kernels is None else FewRowsKernel(kernels).apply_factored_
