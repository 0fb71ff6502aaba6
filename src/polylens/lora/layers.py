"""Adapted layers: the loaded model's own modules, with a forward that adds the deltas of the batch.

Only the *instance's* `forward` is replaced: weights stay where they are and shared, `isinstance` and
`state_dict` do not change, and `unwrap` restores the module. A deep copy of a wrapped model would keep
calling the original's layers: copy before wrapping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from polylens.core import EXPERT_KINDS, Change, Delta, LayerKind, LayerSpec, Replacement
from polylens.errors import InternalError, ModelLoadError, PolylensError, RowRuleError
from polylens.lora.context import RoutingContext
from polylens.lora.cost import CostModel, Way
from polylens.lora.experts import DenseExpertsModule, ExpertsModule
from polylens.lora.kernels import ApplyFactored
from polylens.lora.linear import PLAIN_FORWARDS
from polylens.lora.modules import EmbeddingModule, HeadNormModule, RowsModule, SpecialModule, with_parameters
from polylens.lora.ops import Scratch, apply_factored_, apply_fused_
from polylens.lora.routing import DeltaRows
from polylens.lora.special import apply_special_, overwrites_all, part, with_more_outputs
from polylens.models.families import llama4
from polylens.models.row_rules import COUNTED_RULES, RowRule

MATMULS = frozenset({torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm})
"""The calls by which a module may multiply with a bare parameter, x @ W."""


ALWAYS_FACTORED = 8
"""Rows of a segment up to which no layer that is worth the thought is fused: decode steps need not ask the cost model,
which they would some hundred times."""


class WrappedLayers:
    """The wrapped layers of one model; `unwrap` takes everything back (once; later calls do nothing)."""

    def __init__(self, ctx: RoutingContext, scratch: Scratch) -> None:
        self._ctx = ctx
        self._scratch = scratch
        self._wrapped: list[tuple[nn.Module, Callable[..., Any] | None]] = []
        self._watched: list[str] = []
        self.factored_only: tuple[str, ...] = ()
        """Layers that have a forward of their own (quantised ones, say) and so are never fused."""

    @property
    def scratch_bytes(self) -> int:
        """Memory held for fused weights: at most one layer's weight per dtype."""
        return self._scratch.num_bytes

    def unwrap(self) -> None:
        while self._wrapped:
            module, previous = self._wrapped.pop()
            if previous is None:
                del module.forward
            else:
                module.forward = previous
        self._ctx.forget_shared()
        while self._watched:
            self._ctx.forget_calls(self._watched.pop())
        self._scratch.clear()

    def _replace_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._wrapped.append((module, module.__dict__.get("forward")))
        module.forward = forward

    def _watch(self, layer: str, rule: RowRule) -> None:
        self._ctx.watch_calls(layer, rule)
        self._watched.append(layer)


def wrap_layers(
    model: nn.Module,
    specs: Iterable[LayerSpec],
    ctx: RoutingContext,
    rules: Mapping[str, RowRule],
    cost: CostModel,
    apply_factored: ApplyFactored = apply_factored_,
) -> WrappedLayers:
    """Make the layers of `model` named by `specs` add the deltas that `ctx` routes to them.

    rules: row rule of tower and connector layers by name; a layer without one counts as UNPROVEN. Rules
    of language layers are not used: they see the rows that `ctx.text` is given. apply_factored: how the factored
    way is computed (`kernels.choose_factored`). Raises ModelLoadError for a spec that does not fit the model, and
    leaves the model as it was.
    """
    scratch = Scratch()
    wrapped = WrappedLayers(ctx, scratch)
    core = [_Layer(spec, rules.get(spec.name, RowRule.UNPROVEN), ctx, cost, scratch, apply_factored) for spec in specs]
    try:
        factored_only = [layer.spec.name for layer in core if not _wrap_linear(model, layer, wrapped)]
        _wrap_matmuls(model, core, wrapped)
        _wrap_others(model, core, wrapped)
    except PolylensError:
        wrapped.unwrap()
        raise
    for layer in core:
        if layer.rule in COUNTED_RULES:
            wrapped._watch(layer.spec.name, layer.rule)
    wrapped.factored_only = tuple(factored_only)
    return wrapped


class _Layer:
    """What linear and matmul layers share: ask for the rows, choose the way, compute."""

    def __init__(
        self,
        spec: LayerSpec,
        rule: RowRule,
        ctx: RoutingContext,
        cost: CostModel,
        scratch: Scratch,
        apply_factored: ApplyFactored,
    ) -> None:
        self.spec = spec
        self.rule = rule
        self.ctx = ctx
        self._cost = cost
        self.scratch = scratch
        self._apply_factored = apply_factored
        self._in_first = spec.kind is LayerKind.MATMUL

    def rows_of(self, x: torch.Tensor) -> tuple[DeltaRows[Change], ...]:
        """The deltas to add to this call; raises RowRuleError before anything is computed."""
        return self.ctx.delta_rows(self.spec, self.rule, x.numel() // self.spec.in_features)

    def split(self, rows: Sequence[DeltaRows[Delta]]) -> tuple[list[DeltaRows[Delta]], list[DeltaRows[Delta]]]:
        """(factored, fused) by cost."""
        factored: list[DeltaRows[Delta]] = []
        fused: list[DeltaRows[Delta]] = []
        if self._cost.mode == "auto" and all(stop - start <= ALWAYS_FACTORED for _, start, stop in rows):
            return list(rows), fused
        for row in rows:
            (factored if self.way_of(row) == "factored" else fused).append(row)
        return factored, fused

    def factored(self, x: torch.Tensor, y: torch.Tensor, rows: Sequence[DeltaRows[Delta]]) -> torch.Tensor:
        """The base layer's output `y` of `x` with the deltas added, in place where its layout allows."""
        y = y.contiguous()
        spec = self.spec
        x_ti, y_to = x.reshape(-1, spec.in_features), y.view(-1, spec.out_features)
        self._apply_factored(x_ti, y_to, _in_dtype(rows, y.dtype))
        return y

    def fused(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: Sequence[DeltaRows[Delta]]
    ) -> torch.Tensor:
        """The layer's output with the deltas of `rows`, without a base forward."""
        x_ti = x.reshape(-1, self.spec.in_features)
        y_to = x.new_empty(x_ti.shape[0], self.spec.out_features)
        apply_fused_(x_ti, y_to, weight, bias, _in_dtype(rows, weight.dtype), self.scratch, in_first=self._in_first)
        return y_to.view(*x.shape[:-1], self.spec.out_features)

    def mixed(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: Sequence[DeltaRows[Change]],
        base: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """Each delta its cheaper way. `base` runs the base layer and is called only if nothing is fused."""
        if self.ctx.special:
            plain, special = part(rows)
            if special:
                return self._special(x, weight, bias, plain, special, base)
        factored, fused = self.split(rows)  # type: ignore[arg-type]  # all are plain here
        y = self.fused(x, weight, bias, fused) if fused else base()
        return self.factored(x, y, factored) if factored else y

    def way_of(self, row: DeltaRows[Change] | DeltaRows[Delta]) -> Way:
        spec = self.spec
        return self._cost.choose(row.stop - row.start, spec.in_features, spec.out_features, row.delta.rank)

    def _special(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        plain: Sequence[DeltaRows[Delta]],
        special: Sequence[DeltaRows[Change]],
        base: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """`mixed` where some rows have more than plain factors (see `lora.special`)."""
        spec = self.spec
        x_ti = x.reshape(-1, spec.in_features)
        if overwrites_all(special, x_ti.shape[0], self.way_of):
            y = x.new_empty(*x.shape[:-1], spec.out_features)
        else:
            factored, fused = self.split(plain)
            y = self.fused(x, weight, bias, fused) if fused else base()
            y = self.factored(x, y, factored) if factored else y.contiguous()
        y_to = y.view(-1, spec.out_features)
        apply_special_(x_ti, y_to, weight, bias, special, self.scratch, self.way_of, in_first=self._in_first)
        return y if self._in_first else with_more_outputs(x_ti, y, special)


def _in_dtype(rows: Sequence[DeltaRows[Delta]], dtype: torch.dtype) -> Sequence[DeltaRows[Delta]]:
    """The same deltas in a layer's own dtype: a model may keep single layers in float32."""
    for row in rows:
        if row.delta.a.dtype is not dtype:
            break
    else:
        return rows
    return [row._replace(delta=replace(row.delta, a=row.delta.a.to(dtype), b=row.delta.b.to(dtype))) for row in rows]


def _wrap_linear(model: nn.Module, layer: _Layer, wrapped: WrappedLayers) -> bool:
    """Wrap an `nn.Linear` (other kinds: nothing to do). False if it can only be applied factored."""
    if layer.spec.kind is not LayerKind.LINEAR:
        return True
    module = _module(model, layer.spec.name, layer.spec)
    if not isinstance(module, nn.Linear):
        raise ModelLoadError(f"layer {layer.spec.name} is a {type(module).__name__}, not an nn.Linear")
    _check_shape(layer.spec, (module.out_features, module.in_features), in_first=False)
    _refuse_twice(module, layer.spec)
    plain = type(module).forward in PLAIN_FORWARDS and "forward" not in module.__dict__
    linear = _PlainLinear(module, layer) if plain else _OpaqueLinear(module, layer)
    wrapped._replace_forward(module, linear.forward)
    return plain


class _PlainLinear:
    """An `nn.Linear` as torch defines it: deltas are applied factored or fused."""

    def __init__(self, module: nn.Linear, layer: _Layer) -> None:
        self._module = module
        self._layer = layer
        self._base = module.forward

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        layer = self._layer
        if not layer.ctx.active:
            return self._base(input)
        rows = layer.rows_of(input)
        if not rows:
            return self._base(input)
        module = self._module
        return layer.mixed(input, module.weight, module.bias, rows, lambda: self._base(input))


class _OpaqueLinear:
    """A linear layer whose forward is its own: its weight may not be what it multiplies by, so never fused."""

    def __init__(self, module: nn.Linear, layer: _Layer) -> None:
        self._module = module
        self._layer = layer
        self._base = module.forward

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        layer = self._layer
        rows = layer.rows_of(input)
        y = self._base(input)
        plain, special = part(rows)
        y = layer.factored(input, y, plain) if plain else y
        return self._special(input, y, special) if special else y

    def _special(self, input: torch.Tensor, y: torch.Tensor, rows: Sequence[DeltaRows[Change]]) -> torch.Tensor:
        """Replaced parameters through the module's own forward, all else added to its output."""
        y = y.contiguous()
        x_ti, y_to = input.reshape(-1, self._layer.spec.in_features), y.view(-1, self._layer.spec.out_features)
        for row in rows:
            if isinstance(row.delta, Replacement):
                with with_parameters(self._module, row.delta.tensors()):
                    y_to[row.start : row.stop] = self._base(x_ti[row.start : row.stop])[:, : y_to.shape[1]]
        others = [row for row in rows if not isinstance(row.delta, Replacement)]
        bias = self._module.bias
        apply_special_(x_ti, y_to, self._module.weight, bias, others, self._layer.scratch, lambda _: "factored")
        return with_more_outputs(x_ti, y, rows)


def _wrap_matmuls(model: nn.Module, layers: Iterable[_Layer], wrapped: WrappedLayers) -> None:
    """Wrap the modules that own bare parameters, one wrapper a module."""
    owners: dict[str, dict[str, _Layer]] = {}
    for layer in layers:
        if layer.spec.kind is LayerKind.MATMUL:
            path, _, parameter = layer.spec.name.rpartition(".")
            owners.setdefault(path, {})[parameter] = layer
    for path, by_parameter in owners.items():
        first = next(iter(by_parameter.values()))
        module = _module(model, path, first.spec)
        _refuse_twice(module, first.spec)
        for parameter, layer in by_parameter.items():
            weight = module._parameters.get(parameter)
            if weight is None:
                raise ModelLoadError(f"layer {layer.spec.name}: the model has no such parameter")
            _check_shape(layer.spec, tuple(weight.shape), in_first=True)
        wrapped._replace_forward(module, _MatmulOwner(module, by_parameter).forward)


class _MatmulOwner:
    """A module that multiplies with bare parameters (x @ W): its products are caught and given their deltas."""

    def __init__(self, module: nn.Module, layers: Mapping[str, _Layer]) -> None:
        self._module = module
        self._layers = layers
        self._base = module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        adapted = {name: layer for name, layer in self._layers.items() if layer.ctx.has_delta(layer.spec.name)}
        if not adapted:
            return self._base(*args, **kwargs)
        with _CatchMatmul([(self._module.get_parameter(name), layer) for name, layer in adapted.items()]) as catch:
            result = self._base(*args, **kwargs)
        catch.check_all_caught()
        return result


class _CatchMatmul(TorchFunctionMode):
    """While active, x @ W of the given parameters W runs with their deltas."""

    def __init__(self, parameters: Sequence[tuple[torch.Tensor, _Layer]]) -> None:
        super().__init__()
        self._parameters = parameters
        self._caught: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in MATMULS and len(args) == 2 and not kwargs:
            for weight, layer in self._parameters:
                if args[1] is weight:
                    self._caught.add(layer.spec.name)
                    return self._multiply(func, args[0], args[1], layer)
        return func(*args, **(kwargs or {}))

    def _multiply(self, func: Callable[..., Any], x: torch.Tensor, weight: torch.Tensor, layer: _Layer) -> torch.Tensor:
        rows = layer.rows_of(x)
        if not rows:
            return func(x, weight)
        return layer.mixed(x, weight, None, rows, lambda: func(x, weight))

    def check_all_caught(self) -> None:
        """Raise RowRuleError if a parameter was not used as x @ W: its delta would be lost silently."""
        for _, layer in self._parameters:
            if layer.spec.name not in self._caught and layer.rule is not RowRule.NO_EFFECT:
                raise RowRuleError(f"layer {layer.spec.name}: its parameter was not used in a product x @ W")


_OTHER_KINDS: Mapping[LayerKind, type[RowsModule | HeadNormModule | EmbeddingModule]] = {
    LayerKind.CONV: RowsModule,
    LayerKind.NORM: RowsModule,
    LayerKind.HEAD_NORM: HeadNormModule,
    LayerKind.ROUTER: RowsModule,
    LayerKind.EMBEDDING: EmbeddingModule,
}


def _wrap_others(model: nn.Module, layers: Sequence[_Layer], wrapped: WrappedLayers) -> None:
    """Wrap patch embeddings, norms, routers and the token embedding, and the modules that own experts."""
    owners: dict[str, dict[str, LayerSpec]] = {}
    for layer in layers:
        if layer.spec.kind in EXPERT_KINDS:
            path, _, parameter = layer.spec.name.rpartition(".")
            owners.setdefault(path, {})[parameter] = layer.spec
    for path, specs in owners.items():
        first = next(iter(specs.values()))
        module = _module(model, path, first)
        _refuse_twice(module, first)
        experts = DenseExpertsModule if llama4.are_experts(module) else ExpertsModule
        wrapped._replace_forward(module, experts(module, specs, layers[0].ctx).forward)
    for layer in layers:
        if layer.spec.kind is LayerKind.SHARED:
            path, _, parameter = layer.spec.name.rpartition(".")
            layer.ctx.share(layer.spec.name, _module(model, path, layer.spec), parameter)
        kind = _OTHER_KINDS.get(layer.spec.kind)
        if kind is not None:
            module = _module(model, layer.spec.name, layer.spec)
            _refuse_twice(module, layer.spec)
            wrapped._replace_forward(module, kind(module, layer.spec, layer.rule, layer.ctx).forward)


def _module(model: nn.Module, path: str, spec: LayerSpec) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise ModelLoadError(f"layer {spec.name}: the model has no module {path!r}") from error


def _check_shape(spec: LayerSpec, shape: tuple[int, ...], *, in_first: bool) -> None:
    expected = (spec.in_features, spec.out_features) if in_first else (spec.out_features, spec.in_features)
    if shape != expected:
        raise ModelLoadError(f"layer {spec.name}: its weight has shape {shape}, expected {expected}")


def _refuse_twice(module: nn.Module, spec: LayerSpec) -> None:
    owner = getattr(module.__dict__.get("forward"), "__self__", None)
    if isinstance(
        owner, _PlainLinear | _OpaqueLinear | _MatmulOwner | SpecialModule | ExpertsModule | DenseExpertsModule
    ):
        raise InternalError(f"layer {spec.name} is wrapped already; unwrap it first")
