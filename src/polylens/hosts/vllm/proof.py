"""Proof that a module of vLLM's computes what the checkpoint's layer does: by its output, not by its name.

Each placed layer is given one random vector, and some of its outputs must equal those of the checkpoint's weight. A
packed projection in another order, a permuted one or a wrong name cannot pass. The cost is one row through the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from polylens.core import BARE_KINDS, LayerKind

if TYPE_CHECKING:
    from polylens.core import LayerSpec
    from polylens.hosts.vllm.base import BaseModel
    from polylens.hosts.vllm.placement import Place

NUM_ROWS = 8
"""Outputs compared at each end of a layer."""

PRODUCTS = (LayerKind.LINEAR, LayerKind.ROUTER, LayerKind.CONV)
"""Layers whose module can be run alone on a vector."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference to the checkpoint's product, relative to its root mean square: rounding, far from another layer's
values."""


def unproven_layers(base: BaseModel, model: nn.Module, places: Mapping[str, Place]) -> dict[str, str]:
    """Layers whose place could not be proven -> why."""
    by_path: dict[str, list[str]] = defaultdict(list)
    for name, place in places.items():
        by_path[place.path].append(name)
    wrong = {}
    with torch.inference_mode():
        for path, names in by_path.items():
            specs = [base.layers.specs[name] for name in names]
            compare = _Comparison(base, model, path, specs)
            wrong.update({spec.name: why for spec in specs if (why := compare.fault(spec, places[spec.name]))})
    return wrong


class _Comparison:
    def __init__(self, base: BaseModel, model: nn.Module, path: str, specs: Sequence[LayerSpec]) -> None:
        self._base = base
        self._path = path
        spec = specs[0]
        generator = torch.Generator().manual_seed(0)
        self._x_i = torch.randn(spec.in_features, generator=generator)
        if spec.kind in PRODUCTS:
            module = model.get_submodule(path)
            self._y_o = run_alone(module, self._x_i[None])[0].float().cpu()
            self._dtype = next((p.dtype for p in module.parameters()), torch.float32)
        self._model = model

    def fault(self, spec: LayerSpec, place: Place) -> str | None:
        if spec.kind is LayerKind.EMBEDDING:
            return self._fault_of_rows(spec)
        if spec.kind not in PRODUCTS:
            return self._fault_of_values(spec, place)
        ends = _ends(spec.out_features)
        weight = self._base.checkpoint.rows(f"{spec.name}.weight", ends)
        if weight is None:
            return "the checkpoint has no one tensor of it"
        self._x_i = self._x_i.to(self._dtype).float()
        expected = weight.flatten(1).to(self._dtype).float() @ self._x_i
        bias = self._base.checkpoint.rows(f"{spec.name}.bias", ends)
        if bias is not None:
            expected = expected + bias.float()
        actual = torch.cat([self._y_o[place.start : place.stop][rows] for rows in ends])
        scale = expected.square().mean().sqrt().clamp_min(1e-30)
        error = ((actual - expected).abs().max() / scale).item()
        if not error <= TOLERANCE[self._dtype]:
            return f"vLLM's {self._path} does not compute what the checkpoint's layer does (off by {error:.1e})"
        return None

    def _fault_of_rows(self, spec: LayerSpec) -> str | None:
        """The embedding keeps its values, and puts out those of a token's row."""
        ends = _ends(spec.in_features)
        stored = self._base.checkpoint.rows(f"{spec.name}.weight", ends)
        module = self._model.get_submodule(self._path)
        ids_t = torch.cat([torch.arange(rows.start, rows.stop) for rows in ends])
        own: Any = next(module.parameters())
        if stored is None or not torch.equal(stored.to(own.dtype), module(ids_t.to(own.device)).cpu()):
            return f"vLLM's {self._path} has other values than the checkpoint"
        return None

    def _fault_of_values(self, spec: LayerSpec, place: Place) -> str | None:
        """Norms and bare parameters keep their values where vLLM can be asked for them."""
        is_parameter = spec.kind in BARE_KINDS
        stored = self._base.checkpoint.read(spec.name if is_parameter else f"{spec.name}.weight")
        own = self._model.get_parameter(place.path if is_parameter else f"{place.path}.weight")
        if stored is None or stored.shape != own.shape or not torch.equal(stored.to(own.dtype), own.cpu()):
            return f"vLLM's {self._path} has other values than the checkpoint"
        return None


def run_alone(module: nn.Module, x_ti: torch.Tensor) -> torch.Tensor:
    """The module's output of rows, bias included, (t, out)."""
    parameters = dict(module.named_parameters(recurse=False))
    some: Any = next(iter(parameters.values()))
    x_ti = x_ti.to(device=some.device, dtype=some.dtype)
    if isinstance(module, VocabParallelEmbedding):
        return module.quant_method.apply(module, x_ti, bias=getattr(module, "bias", None))
    kernel = getattr(module, "kernel_size", None)
    if kernel is not None:
        channels = x_ti.shape[1] // torch.Size(kernel).numel()
        return module(x_ti.view(-1, channels, *kernel)).flatten(1)
    y = module(x_ti)
    if not isinstance(y, tuple):
        return y
    return y[0] if y[1] is None else y[0] + y[1]


def _ends(size: int) -> list[slice]:
    if size <= 2 * NUM_ROWS:
        return [slice(0, size)]
    return [slice(0, NUM_ROWS), slice(size - NUM_ROWS, size)]
