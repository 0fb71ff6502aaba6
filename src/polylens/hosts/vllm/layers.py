"""Deltas on vLLM's modules, in place: only the instance's `forward` is replaced.

A packed module holds several of an adapter's layers side by side in its outputs. vLLM packs its weights for the
machine and keeps no plain ones, so plain deltas are always added through their rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from polylens.core import Change, LayerKind, LayerSpec, Replacement
from polylens.hosts.vllm.norms import NormModule
from polylens.hosts.vllm.placement import LINEAR_KINDS, VLLM_NORMS
from polylens.lora.cost import CostModel
from polylens.lora.kernels import choose_factored
from polylens.lora.layers import _in_dtype, _Layer, _MatmulOwner
from polylens.lora.modules import EmbeddingModule, RowsModule
from polylens.lora.ops import Scratch
from polylens.lora.routing import DeltaRows
from polylens.lora.special import apply_special_, part
from polylens.models.row_rules import COUNTED_RULES, RowRule

if TYPE_CHECKING:
    from polylens.hosts.vllm.placement import Place
    from polylens.lora.context import RoutingContext
    from polylens.lora.kernels import ApplyFactored


@dataclass(frozen=True)
class Part:
    """A layer of an adapter inside a module: outputs [start, stop)."""

    spec: LayerSpec
    rule: RowRule
    start: int
    stop: int


def wrap_modules(
    model: nn.Module,
    specs: Mapping[str, LayerSpec],
    places: Mapping[str, Place],
    rules: Mapping[str, RowRule],
    ctx: RoutingContext,
    device: torch.device,
) -> None:
    """Make the modules at `places` add what `ctx` routes to them. rules: by layer name; language layers need none."""
    apply_factored = choose_factored(device)
    parts: dict[str, list[Part]] = defaultdict(list)
    matmuls: dict[str, dict[str, _Layer]] = defaultdict(dict)
    for name, place in places.items():
        spec, rule = specs[name], rules.get(name, RowRule.UNPROVEN)
        if rule in COUNTED_RULES:
            ctx.watch_calls(name, rule)
        if spec.kind in LINEAR_KINDS:
            parts[place.path].append(Part(spec, rule, place.start, place.stop))
        elif spec.kind is LayerKind.SHARED:
            path, _, parameter = place.path.rpartition(".")
            ctx.share(name, model.get_submodule(path), parameter)
        elif spec.kind is LayerKind.MATMUL:
            path, _, parameter = place.path.rpartition(".")
            matmuls[path][parameter] = _Layer(spec, rule, ctx, CostModel("factored"), Scratch(), apply_factored)
        else:
            module = model.get_submodule(place.path)
            module.forward = _module_class(module, spec)(module, spec, rule, ctx).forward
    for path, members in parts.items():
        _wrap(model.get_submodule(path), members, ctx, apply_factored)
    for path, layers in matmuls.items():
        owner = model.get_submodule(path)
        owner.forward = _MatmulOwner(owner, layers).forward


def _module_class(module: nn.Module, spec: LayerSpec) -> type[EmbeddingModule | NormModule | RowsModule]:
    if spec.kind is LayerKind.EMBEDDING:
        return EmbeddingModule
    return NormModule if isinstance(module, VLLM_NORMS) else RowsModule


def _wrap(module: nn.Module, parts: Sequence[Part], ctx: RoutingContext, apply_factored: ApplyFactored) -> None:
    if isinstance(module, VocabParallelEmbedding):
        module.quant_method = _Head(module.quant_method, parts, ctx, apply_factored)
    else:
        module.forward = _Linear(module, parts, ctx, apply_factored).forward


class _Linear:
    """A linear module, of vLLM's or torch's, with its parts' deltas."""

    def __init__(self, module: Any, parts: Sequence[Part], ctx: RoutingContext, apply_factored: ApplyFactored) -> None:
        self._module = module
        self._parts = parts
        self._ctx = ctx
        self._apply_factored = apply_factored
        self._base = module.forward

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self._ctx.active:
            return self._base(x, *args, **kwargs)
        routed = _routed(self._parts, self._ctx, x)
        result = self._base(x, *args, **kwargs)
        if not routed:
            return result
        y, *others = result if isinstance(result, tuple) else (result,)
        left_out = others[0] if others else None
        y = add_changes(x, y, routed, self._module.bias, self._apply_factored, bias_included=left_out is None)
        return (y, *others) if isinstance(result, tuple) else y


class _Head:
    """The quantisation method of vLLM's output head, which is the only thing that vLLM calls of it."""

    def __init__(self, method: Any, parts: Sequence[Part], ctx: RoutingContext, apply_factored: ApplyFactored) -> None:
        self._method = method
        self._parts = parts
        self._ctx = ctx
        self._apply_factored = apply_factored

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not self._ctx.active:
            return self._method.apply(layer, x, bias)
        routed = _routed(self._parts, self._ctx, x)
        y = self._method.apply(layer, x, bias)
        return add_changes(x, y, routed, bias, self._apply_factored) if routed else y


Routed = list[tuple[Part, tuple[DeltaRows[Change], ...]]]


def _routed(parts: Sequence[Part], ctx: RoutingContext, x: torch.Tensor) -> Routed:
    """Parts that change in this call, with whose rows; raises RowRuleError before anything is computed."""
    num_rows = x.numel() // x.shape[-1]
    found = [(one, ctx.delta_rows(one.spec, one.rule, num_rows)) for one in parts]
    return [(one, rows) for one, rows in found if rows]


def add_changes(
    x: torch.Tensor,
    y: torch.Tensor,
    routed: Routed,
    bias: torch.Tensor | None,
    apply_factored: ApplyFactored,
    *,
    bias_included: bool = True,
) -> torch.Tensor:
    """`y` (…, out) with every part's changes on its rows and outputs, in place where its layout allows.

    bias: the module's own. bias_included: whether `y` has it; if not, it is added by who called.
    """
    y = y.contiguous()
    # A router's scores may be in another dtype than what it sees.
    x_ti, y_to = x.reshape(-1, x.shape[-1]).to(y.dtype), y.view(-1, y.shape[-1])
    for one, rows in routed:
        own = y_to[:, one.start : one.stop]
        plain, special = part(rows)
        if plain:
            apply_factored(x_ti, own, _in_dtype(plain, y.dtype))
        if special:
            bias_o = None if bias is None else bias[one.start : one.stop].to(y.dtype)
            _apply_special_(x_ti, own, special, bias_o, bias_included)
    return y


def _apply_special_(
    x_ti: torch.Tensor,
    y_to: torch.Tensor,
    rows: Sequence[DeltaRows[Change]],
    bias_o: torch.Tensor | None,
    bias_included: bool,
) -> None:
    """DoRA, biases and replaced parameters; the base module's weight is not at hand, and not needed for them."""
    if bias_o is not None and not bias_included:
        for row in rows:
            y_to[row.start : row.stop] += bias_o
    factored = []
    for row in rows:
        if isinstance(row.delta, Replacement):
            _replace_(x_ti[row.start : row.stop], y_to[row.start : row.stop], row.delta, bias_o)
        else:
            factored.append(row)
    apply_special_(x_ti, y_to, x_ti, bias_o, factored, Scratch(), lambda _: "factored")
    if bias_o is not None and not bias_included:
        for row in rows:
            y_to[row.start : row.stop] -= bias_o


def _replace_(x_ti: torch.Tensor, y_to: torch.Tensor, change: Replacement, bias_o: torch.Tensor | None) -> None:
    new_bias = bias_o if change.bias is None else change.bias.to(y_to.dtype)
    if change.weight is None:
        if new_bias is not None and bias_o is not None:
            y_to += new_bias - bias_o
    else:
        y_to.copy_(nn.functional.linear(x_ti, change.weight.to(x_ti.dtype), new_bias))
