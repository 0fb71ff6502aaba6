"""Norms of vLLM's own classes under adapters that have norms of their own (`modules_to_save`).

vLLM's norms may add a residual to their input, in place, and hand it on: `norm(x, residual) -> (y, x + residual)`. On
an adapter's rows the same module runs again on the same inputs with that adapter's parameters, so that what comes out
is what vLLM would compute with these parameters loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polylens.core import LayerKind
from polylens.errors import RowRuleError
from polylens.lora.modules import SpecialModule, with_parameters

if TYPE_CHECKING:
    import torch

    from polylens.core import Change
    from polylens.lora.routing import DeltaRows


class NormModule(SpecialModule):
    """Vectors of a norm are rows; of a norm inside attention, (tokens, heads, width), each token's are one row."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if not self._ctx.special or not self._ctx.has_delta(self._spec.name):
            return self._run(x, residual)
        x_rows = self._as_rows(x)
        rows = self._ctx.delta_rows(self._spec, self._rule, len(x_rows))
        residual_rows = None if residual is None else self._as_rows(residual)
        # Copies: the base module may write into both.
        given = [(row, _copied(x_rows, row), _copied(residual_rows, row)) for row in rows]
        y, *others = self._outputs(self._run(x, residual))
        y = y.contiguous()
        y_rows = self._as_rows(y)
        for row, own_x, own_residual in given:
            with with_parameters(self._module, self._parameters_of(row.delta)):
                y_rows[row.start : row.stop] = self._outputs(self._run(own_x, own_residual))[0]
        return (y, *others) if others else y

    def _run(self, x: torch.Tensor | None, residual: torch.Tensor | None) -> Any:
        return self._base(x) if residual is None else self._base(x, residual)

    def _outputs(self, result: Any) -> tuple[torch.Tensor, ...]:
        return result if isinstance(result, tuple) else (result,)

    def _as_rows(self, x: torch.Tensor) -> torch.Tensor:
        if self._spec.kind is not LayerKind.HEAD_NORM:
            return x.reshape(-1, self._spec.in_features)
        if x.shape[0] != self._ctx.num_tokens or x.shape[-1] != self._spec.in_features:
            raise RowRuleError(
                f"layer {self._spec.name}: called on {tuple(x.shape)}, not on its {self._ctx.num_tokens} tokens"
            )
        return x


def _copied(rows: torch.Tensor | None, row: DeltaRows[Change]) -> torch.Tensor | None:
    return None if rows is None else rows[row.start : row.stop].clone()
