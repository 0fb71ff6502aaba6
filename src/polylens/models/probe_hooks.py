"""Random deltas on the layers of an encoder, for the probe only.

A delta here is what an adapter adds to a layer, `y += (x Aᵀ) Bᵀ`, with A (rank, in) and B (out, rank)
random, or for a norm another weight. The probe puts a different one on every layer for every item of a batch
and looks at what comes out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from polylens.core import LayerKind, LayerSpec
from polylens.models.row_rules import ItemSize, RowRule, is_strip, rows_per_item

PROBE_RANK = 4
"""Rank of the random deltas: any rank shows whose delta a row got."""

DELTA_SCALE = 0.5
"""Size of a delta's output relative to the layer's own: plain to see, and no layer drowns the others."""

Calls = Mapping[str, Sequence[int]]
"""Per layer, the number of rows of each of its calls, in order."""

_MATMULS = frozenset({torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__})


@dataclass(frozen=True, eq=False)
class ProbeLayer:
    """A layer to probe. `module`: the linear module, or for MATMUL the module that owns the parameter.

    A module may return a tuple whose first entry is the layer's output.
    """

    spec: LayerSpec
    module: nn.Module

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def weight(self) -> torch.Tensor:
        return self.module.get_parameter(self.spec.parameter)

    @property
    def gain(self) -> float:
        """Size of the layer's output for inputs of size 1 without a preferred direction."""
        return self.weight.float().norm().item() / math.sqrt(self.spec.out_features)

    @property
    def is_sealed(self) -> bool:
        """Whether the weight cannot be changed here: a layer that is never called then counts as out of reach."""
        return False


@dataclass(frozen=True)
class Assignment:
    """Which random delta each row of a batch gets.

    sizes, deltas: per item, in batch order; `deltas` are indexes of random deltas. rules: the layers that
    get deltas at all, and how their rows are divided. rotated: layers where every item deliberately gets
    its neighbour's delta.
    """

    sizes: Sequence[ItemSize]
    deltas: Sequence[int]
    rules: Mapping[str, RowRule]
    rotated: frozenset[str] = frozenset()

    def segments(self, layer: str, num_rows: int, call_index: int) -> Iterator[tuple[int, slice]]:
        """The layer's rows as (delta index, rows); raises RowRuleError where the rule does not fit."""
        if len(set(self.deltas)) == 1:
            yield self.deltas[0], slice(0, num_rows)
            return
        deltas = [*self.deltas[1:], self.deltas[0]] if layer in self.rotated else self.deltas
        start = 0
        rows = rows_per_item(self.rules[layer], self.sizes, num_rows, call_index=call_index, layer=layer)
        for delta, num_item_rows in zip(deltas, rows, strict=True):
            yield delta, slice(start, start + num_item_rows)
            start += num_item_rows


class RandomDeltas:
    """`num_deltas` random deltas for each of `layers`, and the hooks that apply them."""

    def __init__(self, layers: Sequence[ProbeLayer], num_deltas: int, seed: int) -> None:
        self._layers = layers
        generator = torch.Generator().manual_seed(seed)
        self._convolutions = {layer.name for layer in layers if layer.spec.kind is LayerKind.CONV}
        self._additions = {
            layer.name: [_random_addition(layer, generator) for _ in range(num_deltas)] for layer in layers
        }

    @contextmanager
    def applied(self, assignment: Assignment | None) -> Iterator[Calls]:
        """Apply the assignment to every forward inside; yields the log of calls (None: only log)."""
        calls: dict[str, list[int]] = defaultdict(list)

        def change(layer: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            call_index = len(calls[layer])
            calls[layer].append(_num_rows(y, layer in self._convolutions))
            if assignment is None or layer not in assignment.rules:
                return y
            return self._add(layer, x, y, assignment, call_index)

        with ExitStack() as stack:
            parameters: dict[int, str] = {}
            for layer in self._layers:
                if layer.spec.kind is LayerKind.MATMUL:
                    parameters[id(layer.weight)] = layer.name
                    continue
                stack.enter_context(_hooked(layer, change))
            if parameters:
                stack.enter_context(_MatmulInterceptor(parameters, change))
            yield calls

    def _add(
        self, layer: str, x: torch.Tensor, y: torch.Tensor, assignment: Assignment, call_index: int
    ) -> torch.Tensor:
        if layer in self._convolutions:
            x_ti, out_to = x, y.clone()  # (rows, patches, width)
        else:
            x_ti, out_to = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]).clone()
        for delta, rows in assignment.segments(layer, out_to.shape[0], call_index):
            out_to[rows] += self._additions[layer][delta](x_ti[rows], out_to[rows])
        return out_to.view(y.shape)


Change = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer name, its input, its output) -> the output to use instead."""


def _is_row_norm(layer: ProbeLayer, x: Any, y: Any) -> bool:
    """Whether a norm was called on vectors of its width and norms each by itself (some have channels first)."""
    tensors = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
    if not tensors or x.shape != y.shape or x.shape[-1] != layer.spec.in_features:
        return False
    try:
        rows = layer.module.forward(x.reshape(-1, x.shape[-1]).clone())
    except (RuntimeError, IndexError, ValueError, TypeError):  # it wants another number of dimensions
        return False
    return bool(torch.allclose(rows.view(y.shape), y, rtol=1e-4, atol=1e-5))


def _num_rows(y: torch.Tensor, is_convolution: bool) -> int:
    return y.shape[0] if is_convolution else y.numel() // y.shape[-1]


def _as_patches(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A patch embedding's input (n, c, *sides) and output (n, out, *grid) as (n, patches, in) and (n, patches, out)."""
    kernel = module.get_parameter("weight").shape[2:]
    for axis, side in enumerate(kernel):
        x = x.unfold(2 + axis, side, side)
    grid = range(2, 2 + len(kernel))
    x = x.permute(0, *grid, 1, *range(2 + len(kernel), 2 + 2 * len(kernel)))
    return x.reshape(x.shape[0], y[0, 0].numel(), -1), y.flatten(2).transpose(1, 2)


def _with_changed_rows(layer: ProbeLayer, x: torch.Tensor, y: torch.Tensor, change: Change) -> torch.Tensor:
    return change(layer.name, x, y)


def _with_changed_patches(layer: ProbeLayer, x: torch.Tensor, y: torch.Tensor, change: Change) -> torch.Tensor:
    x_npi, y_npo = _as_patches(layer.module, x, y)
    if is_strip(layer.weight.shape[2:], x.shape):  # its patches are the rows
        y_pno = change(layer.name, x_npi.transpose(0, 1), y_npo.transpose(0, 1))
        return y_pno.permute(1, 2, 0).reshape(y.shape)
    return change(layer.name, x_npi, y_npo).transpose(1, 2).reshape(y.shape)


@contextmanager
def _hooked(layer: ProbeLayer, change: Change) -> Iterator[None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> Any:
        y, *others = given if isinstance(given, tuple) else (given,)
        x = args[0] if args else next(iter(kwargs.values()))
        if layer.spec.kind is LayerKind.NORM:
            # One that adds before it norms returns the sum as well, and may have written over what it was given.
            x = others[0] if others else x
            if not _is_row_norm(layer, x, y):
                return given  # as if it were never called: it counts as out of reach
        changed = _with_changed_patches if layer.spec.kind is LayerKind.CONV else _with_changed_rows
        y = changed(layer, x, y, change)
        return (y, *others) if isinstance(given, tuple) else y

    handle = layer.module.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


class _MatmulInterceptor(TorchFunctionMode):
    """Sees every `x @ parameter` of the named parameters."""

    def __init__(self, parameters: Mapping[int, str], change: Change) -> None:
        super().__init__()
        self._parameters = parameters
        self._change = change

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _MATMULS and len(args) == 2 and id(args[1]) in self._parameters:
            return self._change(self._parameters[id(args[1])], args[0], out)
        return out


Addition = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows of a layer's input, the same rows of its output) -> what a delta adds to that output."""


def _random_addition(layer: ProbeLayer, generator: torch.Generator) -> Addition:
    """A random delta: factors, or for a norm other weights, which scale each of its outputs.

    (A norm's input has no bounds, so factors on it would grow from block to block.)
    """
    if layer.spec.kind is LayerKind.NORM:
        scale_o = (torch.randn(layer.spec.out_features, generator=generator) * DELTA_SCALE).to(layer.weight)
        return lambda _, y_to: y_to * scale_o
    a_ri, b_or = _random_factors(layer, generator)
    return lambda x_ti, _: (x_ti @ a_ri.T) @ b_or.T


def _random_factors(layer: ProbeLayer, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors whose output is about DELTA_SCALE times the layer's own, for inputs without a preferred direction."""
    spec, weight, gain = layer.spec, layer.weight, layer.gain
    scale = DELTA_SCALE * (gain if gain > 0 else 1.0)
    a_ri = torch.randn(PROBE_RANK, spec.in_features, generator=generator) / math.sqrt(spec.in_features)
    b_or = torch.randn(spec.out_features, PROBE_RANK, generator=generator) * (scale / math.sqrt(PROBE_RANK))
    return a_ri.to(weight), b_or.to(weight)
