"""The last text layer, computed only for the rows whose hidden states are wanted.

A step wants hidden states of the rows that tokens are sampled from: one a sequence at most, of a prompt's thousands.
The other rows end in the last layer: they give it their keys and values, and nothing reads what it makes of them. So
the layer runs twice: over all rows until its keys and values are written, then over the wanted rows, whose attention
finds its context in the store. (transformers' `logits_to_keep` spares the other rows the head alone.)

This rests on how decoder layers are called: a layer that is called with more than the common arguments (`_ROWS_AT`),
or that gives more than hidden states, computes all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from polylens.models.attention import KeysWrittenError, RaggedBatch

if TYPE_CHECKING:
    from torch import nn

_ROWS_AT = {"position_embeddings": -2, "position_ids": -1}
"""Tensors that decoder layers are given beside the hidden states: their dimension of rows."""


class LastLayer:
    """Stands in for the forward of a text model's last decoder layer."""

    def __init__(self, layer: nn.Module) -> None:
        self._whole: Callable[..., Any] = layer.forward
        self._gives_hidden_states = False  # known from the first step on, which is small and wants all of its rows
        self._may_spare = True

    @classmethod
    def put_into(cls, text: nn.Module) -> None:
        """Put it into a text model, once, if its last layer can be told."""
        layers: Any = getattr(text, "layers", None)
        if layers and cls._in(layers[-1]) is None:
            layers[-1].forward = cls(layers[-1]).forward

    @classmethod
    def _in(cls, layer: nn.Module) -> LastLayer | None:
        placed = getattr(layer.forward, "__self__", None)
        return placed if isinstance(placed, cls) else None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """(1, t, d) -> (1, t, d), or (1, s, d) where the batch then says that only the s wanted rows are given."""
        batch: RaggedBatch | None = kwargs.get("polylens_batch")
        if batch is None or not self._spares(batch, hidden_states.shape[:-1]) or not _is_common(args, kwargs):
            output = self._whole(hidden_states, *args, **kwargs)
            self._gives_hidden_states = isinstance(output, torch.Tensor) and output.shape == hidden_states.shape
            return output
        try:
            return self._whole(hidden_states, *args, **{**kwargs, "polylens_batch": replace(batch, only_keys=True)})
        except KeysWrittenError:  # a layer without keys (a recurrent one) goes on, and is done
            batch.only_wanted = True
        return self._of_wanted(batch, hidden_states, args, kwargs)

    def _spares(self, batch: RaggedBatch, shape: tuple[int, ...]) -> bool:
        """Whether the rows spared weigh more than reading the weights before the attention twice."""
        if batch.wanted is None or not (self._may_spare and self._gives_hidden_states):
            return False
        num_rows = batch.sequences[-1].stop
        return shape == (1, num_rows) and 2 * len(batch.wanted) <= num_rows

    def _of_wanted(
        self, batch: RaggedBatch, hidden_states: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        rows = list(batch.wanted or ())
        # The norm after the last layer has these rows alone, too.
        batch.until_end.enter_context(batch.only_rows([(row, row + 1) for row in rows]))
        if not rows:
            return hidden_states[:, :0]
        chosen = {name: _of_rows(value, _ROWS_AT.get(name), rows) for name, value in kwargs.items()}
        chosen["polylens_batch"] = _wanted_part(batch)
        output: torch.Tensor = self._whole(hidden_states[:, rows], *args, **chosen)
        return output


@contextmanager
def all_rows(text: nn.Module) -> Iterator[None]:
    """Inside, the text model's last layer computes all rows: for those who watch what its modules put out."""
    layers: Any = getattr(text, "layers", None)
    placed = LastLayer._in(layers[-1]) if layers else None
    if placed is None:
        yield
        return
    placed._may_spare = False
    try:
        yield
    finally:
        placed._may_spare = True


def _is_common(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether all arguments that could hold rows are known to."""
    others = [*args, *(value for name, value in kwargs.items() if name not in (*_ROWS_AT, "polylens_batch"))]
    return all(value is None or isinstance(value, bool | int | float | str) for value in others)


def _of_rows(value: Any, dimension: int | None, rows: Sequence[int]) -> Any:
    """`value`, a tensor, a tuple of them, or what has no rows, for these rows alone."""
    if dimension is None or value is None:
        return value
    if isinstance(value, tuple):
        return tuple(_of_rows(part, dimension, rows) for part in value)
    return value.index_select(dimension, torch.tensor(rows, device=value.device))


def _wanted_part(batch: RaggedBatch) -> RaggedBatch:
    """The batch of the wanted rows alone, each the last of its sequence, whose keys are written."""
    ends = {rows.stop - 1: rows for rows in batch.sequences}
    sequences = [replace(ends[row], start=index, stop=index + 1) for index, row in enumerate(batch.wanted or ())]
    return replace(batch, sequences=sequences, keys_are_written=True, masks={})
