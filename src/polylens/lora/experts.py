"""A mixture's experts with deltas: rows are regrouped by expert, so a row's adapter is told by its token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from polylens.core import Change, Delta, LayerKind, LayerSpec, Replacement
from polylens.errors import InternalError
from polylens.lora.context import RoutingContext
from polylens.lora.routing import DeltaRows
from polylens.models.row_rules import RowRule


class Part(NamedTuple):
    """Consecutive rows [start, stop) of the regrouped input: those of one expert and one segment of tokens."""

    expert: int
    segment: int
    start: int
    stop: int


class ExpertsModule:
    """transformers' experts, called with tokens (t, d) and of each token its k experts and their weights, (t, k).

    The base forward serves batches without a change here. Else all rows run expert by expert, and of the rows of
    one expert each adapter's get its delta: y_e += scaling · (x A_eᵀ) B_eᵀ.
    """

    def __init__(self, module: nn.Module, specs: Mapping[str, LayerSpec], ctx: RoutingContext) -> None:
        """specs: by the parameter's name in the module."""
        self._module = module
        self._specs = specs
        self._ctx = ctx
        self._base: Callable[..., torch.Tensor] = module.forward
        self._apply_gate: Callable[[torch.Tensor], torch.Tensor] = getattr(module, "_apply_gate", self._gate)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        if self._ctx.special:
            rows = {name: self._rows(spec, hidden_states) for name, spec in self._specs.items()}
            if any(rows.values()):
                return self._run(hidden_states, top_k_index, top_k_weights, rows)
        return self._base(hidden_states, top_k_index, top_k_weights)

    def _rows(self, spec: LayerSpec, hidden_states: torch.Tensor) -> tuple[DeltaRows[Change], ...]:
        return self._ctx.delta_rows(spec, RowRule.UNPROVEN, hidden_states.shape[0])

    def _run(
        self,
        x_td: torch.Tensor,
        index_tk: torch.Tensor,
        weights_tk: torch.Tensor,
        rows: Mapping[str, Sequence[DeltaRows[Change]]],
    ) -> torch.Tensor:
        """One row for each pair of token and expert, in the experts' order; back to tokens at the end."""
        num_tokens, k = index_tk.shape
        bounds = sorted({0, *(edge for found in rows.values() for row in found for edge in (row.start, row.stop))})
        expert_s, order_s = index_tk.flatten().sort(stable=True)
        token_s = order_s // k
        parts = _parts(expert_s, token_s, bounds)
        y_sd = x_td.new_empty(len(order_s), x_td.shape[1])
        for expert, members in _by_expert(parts):
            whole = slice(members[0].start, members[-1].stop)
            hidden = self._linear("gate_up_proj", x_td[token_s[whole]], expert, members, bounds, rows)
            y_sd[whole] = self._linear("down_proj", self._apply_gate(hidden), expert, members, bounds, rows)
        weighted = y_sd * weights_tk.flatten()[order_s, None]
        by_token = torch.empty_like(weighted)
        by_token[order_s] = weighted
        return by_token.view(num_tokens, k, -1).sum(dim=1).to(x_td.dtype)

    def _linear(
        self,
        name: str,
        x: torch.Tensor,
        expert: int,
        parts: Sequence[Part],
        bounds: Sequence[int],
        rows: Mapping[str, Sequence[DeltaRows[Change]]],
    ) -> torch.Tensor:
        """One expert's linear layer on its rows `x`, with the deltas of the tokens that they are of."""
        in_first = self._specs[name].kind is LayerKind.EXPERTS_IN_FIRST
        weight_eoi = self._module.get_parameter(name)
        y = x @ weight_eoi[expert] if in_first else nn.functional.linear(x, weight_eoi[expert])
        first = parts[0].start
        for part in parts:
            change = _change_at(rows[name], bounds[part.segment])
            if change is not None:
                own = slice(part.start - first, part.stop - first)
                _apply_(change, expert, x[own], y[own], in_first)
        return y

    def _gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activation: Callable[[torch.Tensor], torch.Tensor] = self._module.act_fn  # type: ignore[assignment]
        return activation(gate) * up


class DenseExpertsModule:
    """Llama 4's experts: called with every token for every expert, (experts · t, d), one expert after the other.

    The scores are in the rows already, and the caller sums the outputs: here each adapter's tokens get their deltas in
    all experts at once.
    """

    def __init__(self, module: nn.Module, specs: Mapping[str, LayerSpec], ctx: RoutingContext) -> None:
        """specs: by the parameter's name in the module, of kind EXPERTS_IN_FIRST."""
        self._module = module
        self._specs = specs
        self._ctx = ctx
        self._base: Callable[..., torch.Tensor] = module.forward

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self._ctx.special:
            num_experts = next(iter(self._specs.values())).num_experts
            num_tokens = hidden_states.shape[0] // num_experts
            rows = {
                name: self._ctx.delta_rows(spec, RowRule.UNPROVEN, num_tokens) for name, spec in self._specs.items()
            }
            if any(rows.values()):
                return self._run(hidden_states.view(num_experts, num_tokens, -1), rows).flatten(0, 1)
        return self._base(hidden_states)

    def _run(self, x_etd: torch.Tensor, rows: Mapping[str, Sequence[DeltaRows[Change]]]) -> torch.Tensor:
        activation: Callable[[torch.Tensor], torch.Tensor] = self._module.act_fn  # type: ignore[assignment]
        gate, up = self._linear("gate_up_proj", x_etd, rows).chunk(2, dim=-1)
        return self._linear("down_proj", up * activation(gate), rows)

    def _linear(self, name: str, x_eti: torch.Tensor, rows: Mapping[str, Sequence[DeltaRows[Change]]]) -> torch.Tensor:
        y_eto = torch.bmm(x_eti, self._module.get_parameter(name))
        for change, start, stop in rows[name]:
            x, y = x_eti[:, start:stop], y_eto[:, start:stop]
            if isinstance(change, Replacement):
                y.copy_(torch.bmm(x, change.tensors()["weight"].to(y.dtype)))
            elif type(change) is Delta:
                h_etr = torch.bmm(x, change.a.to(x.dtype).mT)
                y.baddbmm_(h_etr, change.b.to(x.dtype).mT, alpha=change.scaling)
            else:
                raise InternalError(f"{change.layer}: experts take factors or whole weights")
        return y_eto


def _parts(expert_s: torch.Tensor, token_s: torch.Tensor, bounds: Sequence[int]) -> list[Part]:
    """Rows sorted by expert, then token, cut where the expert or the segment of tokens changes; one device read.

    bounds: first tokens of the segments, ascending from 0.
    """
    edges = torch.tensor(bounds, device=token_s.device)
    segment_s = torch.searchsorted(edges, token_s, right=True) - 1
    keys, counts = torch.unique_consecutive(expert_s * len(bounds) + segment_s, return_counts=True)
    parts = []
    start = 0
    for key, count in torch.stack((keys, counts), dim=1).tolist():
        parts.append(Part(key // len(bounds), key % len(bounds), start, start + count))
        start += count
    return parts


def _by_expert(parts: Sequence[Part]) -> Iterator[tuple[int, list[Part]]]:
    """The parts of each expert that has rows."""
    members: list[Part] = []
    for part in parts:
        if members and members[-1].expert != part.expert:
            yield members[0].expert, members
            members = []
        members.append(part)
    if members:
        yield members[0].expert, members


def _change_at(rows: Sequence[DeltaRows[Change]], token: int) -> Change | None:
    return next((row.delta for row in rows if row.start <= token < row.stop), None)


def _apply_(change: Change, expert: int, x: torch.Tensor, y: torch.Tensor, in_first: bool) -> None:
    """Change the outputs `y` of one expert for rows `x` in place. in_first: the weight is (in, out)."""
    if isinstance(change, Replacement):
        weight = change.tensors()["weight"][expert].to(y.dtype)
        torch.mm(x, weight if in_first else weight.t(), out=y)
    elif type(change) is Delta:
        h = torch.mm(x, change.a[expert].to(x.dtype).t())
        y.addmm_(h, change.b[expert].to(x.dtype).t(), alpha=change.scaling)
    else:
        raise InternalError(f"{change.layer}: experts take factors or whole weights")
