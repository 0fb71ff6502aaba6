"""Linear layers under more than plain factors: DoRA, biases, replaced weights, replaced head rows.

Contracts beside those of `ops`: for every (change, start, stop), on these rows of `y_to` and no other,

    ScaledDelta   y = scale ⊙ (x W + bias + scaling · (x Aᵀ) Bᵀ) + shift
    Replacement   y = x W' + bias'      (of a head for more tokens: of the base model's; see `with_more_outputs`)
    TokenRows     y[:, ids] = x rowsᵀ + bias[ids]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from polylens.adapters.merge import merged_bias
from polylens.core import Change, Delta, Replacement, ScaledDelta, TokenRows
from polylens.errors import InternalError
from polylens.lora.cost import Way
from polylens.lora.ops import Scratch, fuse_, gemm_
from polylens.lora.routing import DeltaRows


def part(rows: Sequence[DeltaRows[Change]]) -> tuple[list[DeltaRows[Delta]], list[DeltaRows[Change]]]:
    """(rows of plain deltas, rows of everything else)."""
    plain: list[DeltaRows[Delta]] = [row for row in rows if type(row.delta) is Delta]  # type: ignore[misc]
    return plain, [row for row in rows if type(row.delta) is not Delta]


def overwrites_all(
    rows: Sequence[DeltaRows[Change]], num_rows: int, way_of: Callable[[DeltaRows[Change]], Way]
) -> bool:
    """Whether `apply_special_` leaves nothing of what was in y before."""
    only = rows[0]
    whole = len(rows) == 1 and only.stop - only.start == num_rows
    return whole and (isinstance(only.delta, Replacement) or (_is_scaled(only) and way_of(only) == "fused"))


def apply_special_(
    x_ti: torch.Tensor,
    y_to: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: Sequence[DeltaRows[Change]],
    scratch: Scratch,
    way_of: Callable[[DeltaRows[Change]], Way],
    *,
    in_first: bool = False,
) -> None:
    """Change the rows of `y_to`, which holds the base layer's output (or nothing: see `overwrites_all`), in place."""
    for row in rows:
        x, y, change = x_ti[row.start : row.stop], y_to[row.start : row.stop], row.delta
        if isinstance(change, ScaledDelta):
            if way_of(row) == "factored":
                _factored_(x, y, change)
            else:
                _fused_(x, y, weight, bias, change, scratch, in_first)
        elif isinstance(change, Replacement):
            own = change.tensors()
            new = own.get("weight", weight)
            new = new if in_first else new[: y.shape[1]]
            gemm_(x, new.to(y.dtype), _as(own.get("bias", bias), y.dtype), y, in_first)
        elif isinstance(change, TokenRows):
            new_tn = x @ change.rows_nd.to(x.dtype).t()
            ids = list(change.token_ids)
            y[:, ids] = new_tn if bias is None else new_tn + bias[ids]
        else:
            raise InternalError(f"{change.layer}: a plain delta in the special path")


def with_more_outputs(x_ti: torch.Tensor, y: torch.Tensor, rows: Sequence[DeltaRows[Change]]) -> torch.Tensor:
    """`y` (…, out) of a head, with columns for the tokens that adapters bring: -inf in the rows of all others."""
    more = [(row, weight[y.shape[-1] :]) for row in rows if (weight := _taller(row.delta, y.shape[-1])) is not None]
    if not more:
        return y
    size = max(weight.shape[0] for _, weight in more)
    added = y.new_full((*y.shape[:-1], size), -torch.inf)
    for row, weight in more:
        own = added.view(-1, size)[row.start : row.stop, : weight.shape[0]]
        own.copy_(x_ti[row.start : row.stop] @ weight.to(x_ti.dtype).t())
    return torch.cat((y, added), dim=-1)


def _taller(change: Change, num_outputs: int) -> torch.Tensor | None:
    weight = change.weight if isinstance(change, Replacement) else None
    return weight if weight is not None and weight.dim() == 2 and weight.shape[0] > num_outputs else None


def _is_scaled(row: DeltaRows[Change]) -> bool:
    return isinstance(row.delta, ScaledDelta)


def _as(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _factored_(x_ti: torch.Tensor, y_to: torch.Tensor, change: ScaledDelta) -> None:
    h_tr = torch.mm(x_ti, change.a.to(x_ti.dtype).t())
    y_to.addmm_(h_tr, change.b.to(x_ti.dtype).t(), alpha=change.scaling)
    if change.scale_o is not None:
        y_to.mul_(change.scale_o)
    if change.shift_o is not None:
        y_to.add_(change.shift_o)


def _fused_(
    x_ti: torch.Tensor,
    y_to: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    change: ScaledDelta,
    scratch: Scratch,
    in_first: bool,
) -> None:
    fused = scratch.like(weight)
    fuse_(fused, weight, change.a.to(weight.dtype), change.b.to(weight.dtype), change.scaling, in_first)
    if change.scale_o is not None:
        fused.mul_(change.scale_o if in_first else change.scale_o[:, None])
    gemm_(x_ti, fused, _as(merged_bias(bias, change), y_to.dtype), y_to, in_first)
