"""Attention over a ragged batch: many sequences in one row dimension, keys and values in the engine's store.

transformers' text model is called with its rows flattened to (1, t, d). Its attention layers call
`ragged_attention` (registered through `AttentionInterface`), which finds the batch in the keyword argument
`polylens_batch`, writes the new keys and values into the store and lets every sequence attend to its own.
No mask function is registered under the name, so transformers builds no mask; the masks are made here.

Legend: t query rows of the step, n query rows of one sequence, c context length of that sequence
(cached tokens plus its n rows), h query heads, g key/value heads, e head width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from polylens.errors import InternalError, ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Sequence

ATTENTION_NAME = "polylens_ragged"

# Arguments some families pass that change the result and that are not served yet.
_UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias")


class KVStore(Protocol):
    """Where keys and values of all layers live, addressed by slot (one slot a token)."""

    def write(self, layer: int, slots_t: torch.Tensor, k_tge: torch.Tensor, v_tge: torch.Tensor) -> None:
        """Store the step's new keys and values of one layer."""

    def read(self, layer: int, slots_c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (c, g, e) of the given slots."""


@dataclass(frozen=True, eq=False)
class SequenceRows:
    """The rows of one sequence in a step.

    start, stop: its rows in the flattened batch. slots_c: the store's slots of its whole context, the new
    rows' last. spans: [start, stop) token ranges of the sequence whose tokens see each other in both
    directions (image blocks); a span that overlaps the new rows lies within the context.
    """

    start: int
    stop: int
    slots_c: torch.Tensor
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def num_context(self) -> int:
        return self.slots_c.shape[0]

    @property
    def first_position(self) -> int:
        return self.num_context - self.num_rows


@dataclass(eq=False)
class RaggedBatch:
    """One text step: its sequences and where their keys and values go. Masks are shared by all layers."""

    sequences: Sequence[SequenceRows]
    write_slots_t: torch.Tensor
    store: KVStore
    masks: dict[tuple[int, int | None], torch.Tensor | None] = field(default_factory=dict)


def register_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers (idempotent)."""
    AttentionInterface.register(ATTENTION_NAME, ragged_attention)


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    polylens_batch: RaggedBatch | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query (1, h, t, e), key and value (1, g, t, e) -> (1, t, h, e), each sequence attending to its own context."""
    if polylens_batch is None:
        raise InternalError("the text model was called without its ragged batch")
    _refuse_unsupported(kwargs, attention_mask)
    batch, layer = polylens_batch, int(module.layer_idx)  # type: ignore[arg-type]
    batch.store.write(layer, batch.write_slots_t, key[0].transpose(0, 1), value[0].transpose(0, 1))
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    for index, rows in enumerate(batch.sequences):
        q = query[:, :, rows.start : rows.stop]
        out[:, rows.start : rows.stop] = _attend(q, key, value, batch, index, layer, scaling, sliding_window).transpose(
            1, 2
        )
    return out, None


def _attend(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: RaggedBatch,
    index: int,
    layer: int,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """One sequence's attention: (1, h, n, e) queries -> (1, h, n, e)."""
    rows = batch.sequences[index]
    slots_c = rows.slots_c
    if rows.num_rows == 1 and window is not None:
        slots_c = slots_c[-window:]  # a single query sees the window's last tokens and needs no mask
    if rows.first_position == 0:
        k, v = key[:, :, rows.start : rows.stop], value[:, :, rows.start : rows.stop]
    else:
        k, v = (x.transpose(0, 1)[None] for x in batch.store.read(layer, slots_c))
    cache_key = (index, window)
    if cache_key not in batch.masks:
        batch.masks[cache_key] = attention_mask_nc(rows, window, q.device)
    mask = batch.masks[cache_key]
    causal = mask is None and rows.num_rows > 1
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    )


def attention_mask_nc(rows: SequenceRows, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Which context tokens (c) each new row (n) sees: causal or in the same span, and within the window.

    None where plain causal attention (the whole sequence is new), or no mask at all (one row), says the same.
    """
    n, c, first = rows.num_rows, rows.num_context, rows.first_position
    spans = [(a, b) for a, b in rows.spans if b > first and a < c and b - a > 1]
    narrow = window is not None and c > window
    if n == 1 and not spans:
        return None
    if first == 0 and not spans and not narrow:
        return None
    q_pos = torch.arange(first, c, device=device)[:, None]
    k_pos = torch.arange(c, device=device)[None]
    mask = k_pos <= q_pos
    for a, b in spans:
        mask = mask | ((q_pos >= a) & (q_pos < b) & (k_pos >= a) & (k_pos < b))
    if narrow and window is not None:
        mask = mask & (k_pos > q_pos - window)
    return mask


def _refuse_unsupported(kwargs: dict[str, Any], attention_mask: torch.Tensor | None) -> None:
    if attention_mask is not None:
        raise InternalError("transformers built an attention mask for the ragged text model")
    for name in _UNSUPPORTED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise ModelLoadError(f"this model's text attention uses {name!r}, which polylens does not serve yet")
