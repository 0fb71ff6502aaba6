"""Linear layers on few rows, where reading the weights is nearly all of the work.

torch's own float32 path on a CPU (MKL) reads weights at a third of the memory's bandwidth where there are 2 to 16
rows, so in every decode step. The compiled kernel reads them at the whole of it; oneDNN, which torch brings as well,
is the faster one up to some hundred rows. (`benchmarks/NOTES.md` has the figures.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from polylens.native import Kernels

KERNEL_ROWS = 24
"""Rows up to which the compiled kernel was the faster."""

ONEDNN_ROWS = 256
"""Rows up to which oneDNN was the faster; above, both reach the processor's peak."""


class FewRowsLinear(nn.Linear):
    """An `nn.Linear` of float32 on a CPU that is fast on few rows too."""

    kernels: Kernels | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        num_rows = input.numel() // input.shape[-1]
        # Inputs that do not fit are torch's to refuse: the kernel reads by address.
        fits = input.shape[-1] == weight.shape[1] and input.dtype is weight.dtype is torch.float32
        if not fits or not 0 < num_rows <= ONEDNN_ROWS:
            return F.linear(input, weight, bias)
        if self.kernels is None or num_rows > KERNEL_ROWS or not weight.is_contiguous():
            return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
        y = self.kernels.linear(input.reshape(num_rows, -1).contiguous(), weight, bias)
        return y.view(*input.shape[:-1], weight.shape[0])


PLAIN_FORWARDS = (nn.Linear.forward, FewRowsLinear.forward)
"""Forwards that multiply by the module's weight and do nothing else."""


def make_linears_fast(model: nn.Module, kernels: Kernels | None) -> int:
    """Turn the plain `nn.Linear` modules of `model` into `FewRowsLinear`, where it helps; how many.

    The values, shapes and parameters stay what they are.
    """
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return 0
    fast: list[Any] = [module for module in model.modules() if _can_be_fast(module)]
    for module in fast:
        module.__class__ = FewRowsLinear
        module.kernels = kernels
    return len(fast)


def _can_be_fast(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return False
    return module.weight.device.type == "cpu" and module.weight.dtype is torch.float32
