"""Adapted modules that are not linear layers: patch embeddings, norms, routers and the token embedding.

They are few or cheap beside the linear layers, and seldom trained. So the base module runs on all rows, and what
an adapter changes is computed anew on that adapter's rows. `RoutingContext.special` lets all of them be passed
over where no adapter of the batch has such a change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from polylens.adapters.merge import merged_parameters
from polylens.core import Delta, LayerKind, Replacement, ScaledDelta, TokenRows
from polylens.errors import InternalError, RowRuleError
from polylens.models.row_rules import RowRule, is_strip

if TYPE_CHECKING:
    from polylens.core import Change, LayerSpec
    from polylens.lora.context import RoutingContext


@contextmanager
def with_parameters(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """`module` with other parameters for the time being; the engine runs its forwards in one thread."""
    before = {name: module._parameters[name] for name in tensors}
    module._parameters.update(tensors)  # type: ignore[arg-type]  # plain tensors serve a forward as well
    try:
        yield
    finally:
        module._parameters.update(before)


class SpecialModule:
    """What the wrappers of single modules share."""

    def __init__(self, module: nn.Module, spec: LayerSpec, rule: RowRule, ctx: RoutingContext) -> None:
        self._module = module
        self._spec = spec
        self._rule = rule
        self._ctx = ctx
        self._base = module.forward

    def _only_tensor(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        given = (*args, *kwargs.values())
        if len(given) != 1 or not isinstance(given[0], torch.Tensor):
            raise RowRuleError(
                f"layer {self._spec.name}: called with {len(given)} arguments, of which rows are unknown"
            )
        if self._spec.kind is not LayerKind.CONV and given[0].shape[-1] != self._spec.in_features:
            raise RowRuleError(f"layer {self._spec.name}: called on {tuple(given[0].shape)}, which are not its vectors")
        return given[0]

    def _parameters_of(self, change: Change) -> dict[str, torch.Tensor]:
        own = self._module._parameters
        weight = own["weight"]
        if weight is None:
            raise InternalError(f"{self._spec.name} has no weight")
        return merged_parameters(change, self._spec.kind, weight, own.get("bias"))


class HeadNormModule(SpecialModule):
    """A norm inside the text model that may see several vectors a token.

    (1, tokens, heads, d) in some families, (1, heads, tokens, d) in others: which dimension is the tokens' is told by
    its size, and where there are as many heads, by calls before.
    """

    def __init__(self, module: nn.Module, spec: LayerSpec, rule: RowRule, ctx: RoutingContext) -> None:
        super().__init__(module, spec, rule, ctx)
        self._axis: int | None = None
        """Of the tokens, from the end."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._axis is None and len(args) == 1:
            self._learn(args[0])
        if not self._ctx.special or not self._ctx.has_delta(self._spec.name):
            return self._base(*args, **kwargs)
        x = self._only_tensor(args, kwargs)
        num_tokens = self._ctx.num_tokens
        rows = self._ctx.delta_rows(self._spec, self._rule, num_tokens)
        if rows[0].start == 0 and rows[0].stop == num_tokens:
            with with_parameters(self._module, self._parameters_of(rows[0].delta)):
                return self._base(x)
        axis = self._axis
        if axis is None or x.shape[axis] != num_tokens:
            raise RowRuleError(
                f"layer {self._spec.name}: which of {tuple(x.shape)} are its {num_tokens} tokens is not known"
            )
        y = self._base(x).clone()
        for change, start, stop in rows:
            with with_parameters(self._module, self._parameters_of(change)):
                y.narrow(axis, start, stop - start).copy_(self._base(x.narrow(axis, start, stop - start)))
        return y

    def _learn(self, x: torch.Tensor) -> None:
        """Where one dimension alone has the tokens' size. Does nothing outside of a text forward."""
        axes = [axis for axis in range(-x.dim(), -1) if x.shape[axis] == self._ctx.num_tokens]
        if len(axes) == 1:
            self._axis = axes[0]


class RowsModule(SpecialModule):
    """A norm, a patch embedding or a router: rows of an adapter are computed with that adapter's parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._ctx.special or not self._ctx.has_delta(self._spec.name):
            return self._base(*args, **kwargs)
        input = self._only_tensor(args, kwargs)
        x = self._as_rows(input)
        rows = self._ctx.delta_rows(self._spec, self._rule, x.shape[0])
        y = self._base(input)
        # A router puts out a tuple: every expert's score, the chosen ones' weights and which they are.
        outputs = tuple(part.contiguous() for part in (y if isinstance(y, tuple) else (y,)))
        views = [self._as_output_rows(part, x.shape[0], strip=self._is_strip(input)) for part in outputs]
        for change, start, stop in rows:
            with with_parameters(self._module, self._parameters_of(change)):
                own = self._base(x[start:stop])
            for view, part in zip(views, own if isinstance(own, tuple) else (own,), strict=True):
                view[start:stop] = part
        return outputs if isinstance(y, tuple) else outputs[0]

    def _as_rows(self, input: torch.Tensor) -> torch.Tensor:
        """The input with its rows as the first dimension: vectors, or a convolution's patches or tiles."""
        if self._spec.kind is not LayerKind.CONV:
            return input.reshape(-1, input.shape[-1])
        if not self._is_strip(input):
            return input
        width = self._module.get_parameter("weight").shape[3]
        return input[0].unflatten(-1, (-1, width)).permute(2, 0, 1, 3)

    def _is_strip(self, input: torch.Tensor) -> bool:
        kernel = self._module.get_parameter("weight").shape[2:]
        return self._spec.kind is LayerKind.CONV and self._rule is RowRule.PATCHES and is_strip(kernel, input.shape)

    def _as_output_rows(self, output: torch.Tensor, num_rows: int, *, strip: bool) -> torch.Tensor:
        if self._spec.kind is LayerKind.CONV:
            return output.permute(3, 1, 2, 0) if strip else output
        rows = output.view(-1, output.shape[-1])
        if len(rows) != num_rows:
            raise RowRuleError(f"layer {self._spec.name}: {num_rows} rows became {tuple(output.shape)}")
        return rows


class EmbeddingModule(SpecialModule):
    """The token embedding; rows are token ids, of adapters that bring tokens also ones that the base model lacks.

    A vocabulary's weight is never built anew.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self._ctx.special:
            return self._base(input)
        y = self._base(input.clamp(max=self._spec.in_features - 1))
        rows = self._ctx.delta_rows(self._spec, self._rule, input.numel())
        ids_t, y_td = input.reshape(-1), y.view(-1, y.shape[-1])
        for change, start, stop in rows:
            self._apply_(change, ids_t[start:stop], y_td[start:stop])
        return y

    def _apply_(self, change: Change, ids_t: torch.Tensor, y_td: torch.Tensor) -> None:
        if isinstance(change, Replacement):
            with with_parameters(self._module, {"weight": change.tensors()["weight"]}):
                y_td.copy_(self._base(ids_t))
        elif isinstance(change, TokenRows):
            index = torch.tensor(change.token_ids, device=ids_t.device)
            hit_tn = ids_t[:, None] == index
            row_t = hit_tn.any(dim=1)
            y_td[row_t] = self._scaled(change.rows_nd[hit_tn[row_t].long().argmax(dim=1)]).to(y_td.dtype)
        elif isinstance(change, Delta):
            # Summed in float32 and rounded once, as a matrix product would.
            h_tr = change.a[:, ids_t].t().float()
            sum_td = y_td + self._scaled(change.scaling * (h_tr @ change.b.t().float()))
            if isinstance(change, ScaledDelta) and change.scale_o is not None:
                sum_td *= change.scale_o
            y_td.copy_(sum_td)

    def _scaled(self, rows_td: torch.Tensor) -> torch.Tensor:
        """Times what the module multiplies its own rows by (Gemma 3: the root of the width)."""
        scale = getattr(self._module, "embed_scale", None)
        return rows_td if scale is None else rows_td * torch.as_tensor(scale).to(rows_td)
