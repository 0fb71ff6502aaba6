"""Linear layers on few rows, where reading the weights is nearly all of the work.

torch's own float32 path on a CPU (MKL) reads weights at a third of the memory's bandwidth where there are 2 to 16
rows, so in every decode step. oneDNN, which torch brings as well, reads the same weights twice as fast, and computes
up to some hundred rows faster too. (`benchmarks/NOTES.md` has the figures.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

FEW_ROWS = 256
"""Rows up to which oneDNN was the faster; above, both reach the processor's peak."""


LEAST_WIDTH = 256
"""Narrower layers gained nothing from the order of their weights."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (…, i) Wᵀ + bias for W (o, i) -> (…, o), by oneDNN where that is faster."""
    if not _is_few(x) or weight.dtype is not torch.float32:
        return F.linear(x, weight, bias)
    pointwise = torch.ops.mkldnn._linear_pointwise
    if x.numel() == x.shape[-1] and weight.stride(0) == 1:
        # A single row takes oneDNN another way, which reads column-major weights at half the speed.
        y = pointwise(x.reshape(1, -1).expand(2, -1), weight, bias, "none", [], "")[:1]
        return y.view(*x.shape[:-1], weight.shape[0])
    return pointwise(x, weight, bias, "none", [], "")


def _is_few(x: torch.Tensor) -> bool:
    return x.dtype is torch.float32 and x.device.type == "cpu" and 0 < x.numel() <= FEW_ROWS * x.shape[-1]


class FewRowsLinear(nn.Linear):
    """An `nn.Linear` that is fast on few rows too."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


PLAIN_FORWARDS = (nn.Linear.forward, FewRowsLinear.forward)
"""Forwards that multiply by the module's weight and do nothing else."""


def make_linears_fast(model: nn.Module, *few_rows: nn.Module) -> int:
    """Turn the plain `nn.Linear` modules of `model` into `FewRowsLinear`, where it helps; how many.

    few_rows: the parts of the model that decode steps run; their weights are put in column-major order, in place,
    which is faster still. The values, shapes and parameters stay what they are.
    """
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return 0
    fast = [module for module in model.modules() if isinstance(module, nn.Linear) and _can_be_fast(module)]
    decoding = {id(module) for part in few_rows for module in part.modules()}
    shared = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in fast:
        module.__class__ = FewRowsLinear
        weight = module.weight
        if id(module) in decoding and id(weight) not in shared and min(weight.shape) >= LEAST_WIDTH:
            weight.data = weight.data.t().contiguous().t()
    return len(fast)


def _can_be_fast(module: nn.Linear) -> bool:
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return False
    return module.weight.device.type == "cpu" and module.weight.dtype is torch.float32
