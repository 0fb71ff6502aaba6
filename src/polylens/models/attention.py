"""Attention over a ragged batch: many sequences in one row dimension, keys and values in the engine's store.

transformers' text model is called with its rows flattened to (1, t, d). Its attention layers call
`ragged_attention` (registered through `AttentionInterface`), which finds the batch in the keyword argument
`polylens_batch`, writes the new keys and values into the store and lets every sequence attend to its own.
No mask function is registered under the name, so transformers builds no mask; the masks are made here.

Legend: t query rows of the step, n query rows of one sequence, c context length of that sequence
(cached tokens plus its n rows), h query heads, g key/value heads, e head width.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from polylens.errors import InternalError, ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polylens.models.recurrent import CarriedState
    from polylens.native import Kernels

ATTENTION_NAME = "polylens_ragged"

PROMPT_KEPT = "reference_sliding_attention"
"""transformers' kind of layers that see a window of generated tokens, and all of the prompt (Unlimited-OCR)."""

# Tensors that change nothing here: attention is told of a sequence's rows by the batch.
_UNUSED_TENSORS = frozenset({"position_ids", "cache_position", "mm_token_type_ids", "token_type_ids"})


class KeysWrittenError(Exception):
    """Leaves a layer that was run for its keys and values alone; caught by `last_layer`, never seen elsewhere."""


class KVStore(Protocol):
    """Where keys and values of all layers live, addressed by slot (one slot a token)."""

    def write(self, layer: int, slots_t: torch.Tensor, k_tge: torch.Tensor, v_tge: torch.Tensor) -> None:
        """Store the step's new keys and values of one layer."""

    def read(self, layer: int, slots_c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (c, g, e) of the given slots."""

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (slots, g, e) of all slots, contiguous: for kernels that read them where they lie."""


@dataclass(frozen=True)
class Reach:
    """How far back a layer sees: the last `window` tokens, or its own chunk of `chunk` tokens (None: everything).

    keeps_prompt: whether the prompt's tokens are seen in any case.
    spans_whole: the tokens of a span see each other whatever the layer's reach.
    """

    window: int | None = None
    chunk: int | None = None
    keeps_prompt: bool = False
    spans_whole: bool = False

    @classmethod
    def of(cls, module: torch.nn.Module, layer: int, window: int | None) -> Reach:
        """Some layers are told by the config alone: Llama 4's chunked ones, Unlimited-OCR's."""
        config: Any = module.config
        kinds = getattr(config, "layer_types", None) or ()
        kind = kinds[layer] if layer < len(kinds) else None
        if kind == PROMPT_KEPT:
            return cls(config.sliding_window, keeps_prompt=True)
        return cls(window, config.attention_chunk_size if kind == "chunked_attention" else None)

    def first_seen(self, position: int) -> int:
        """The earliest token that the token at `position` sees."""
        starts = [0]
        if self.window is not None:
            starts.append(position + 1 - self.window)
        if self.chunk is not None:
            starts.append(position - position % self.chunk)
        return max(starts)

    def seen_by_last(self, rows: SequenceRows) -> torch.Tensor:
        """The store's slots of all tokens that a sequence's last token sees."""
        last = rows.num_context - 1
        first = self.first_seen(last)
        if self.spans_whole:
            first = min([first, *(start for start, stop in rows.spans if start <= last < stop)])
        if self.keeps_prompt and first > 0:
            return torch.cat([rows.slots_c[: min(first, rows.num_prompt)], rows.slots_c[first:]])
        return rows.slots_c[first:]


@dataclass(frozen=True, eq=False)
class SequenceRows:
    """The rows of one sequence in a step.

    start, stop: its rows in the flattened batch. slots_c: the store's slots of its whole context, the new
    rows' last. spans: [start, stop) token ranges of the sequence whose tokens see each other in both
    directions (image blocks), save those in `holes`; a span that overlaps the new rows lies within the context.
    num_prompt: how many of the sequence's tokens are its prompt's (the first ones).
    """

    start: int
    stop: int
    slots_c: torch.Tensor
    spans: tuple[tuple[int, int], ...] = ()
    num_prompt: int = 0
    holes: tuple[tuple[int, int], ...] = ()

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
    """One text step: its sequences and where their keys and values go. Masks are shared by layers of one reach.

    spans_in_windows_only: whether only sliding-window layers look both ways within spans. spans_beyond_windows:
    whether tokens of a span see each other however far apart they are. carried: each sequence's
    state, for models whose layers carry one (`recurrent`). only_rows: opened around calls that see only these
    [start, stop) ranges of the rows. kernels: compiled ones for sequences that decode, if there are any. wanted: the
    rows whose hidden states are read afterwards, each the last of a sequence (None: all); only_wanted: set where those
    of no other row were computed. only_keys, keys_are_written: the two runs of the last layer then (`last_layer`).
    until_end: left when the text model has run.
    """

    sequences: Sequence[SequenceRows]
    write_slots_t: torch.Tensor
    store: KVStore
    spans_in_windows_only: bool = False
    spans_beyond_windows: bool = False
    carried: Sequence[CarriedState] = ()
    only_rows: Callable[[Sequence[tuple[int, int]]], AbstractContextManager[Any]] = nullcontext
    kernels: Kernels | None = None
    wanted: Sequence[int] | None = None
    only_wanted: bool = False
    only_keys: bool = False
    keys_are_written: bool = False
    until_end: ExitStack = field(default_factory=ExitStack)
    masks: dict[tuple[int, Reach], torch.Tensor | None] = field(default_factory=dict)

    def positions_t(self, device: torch.device) -> torch.Tensor:
        """(t,): the place of each row in its sequence."""
        return torch.cat(
            [torch.arange(rows.first_position, rows.num_context, device=device) for rows in self.sequences]
        )


QueryScale = Callable[[torch.Tensor], torch.Tensor]
"""(t,) places of query rows in their sequences -> (t,) factors of the queries."""

_QUERY_SCALE = "polylens_query_scale"


def set_query_scale(module: torch.nn.Module, scale: QueryScale) -> None:
    """Let queries of an attention layer be multiplied by factors that depend on their places."""
    setattr(module, _QUERY_SCALE, scale)


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
    softcap: float | None = None,
    polylens_batch: RaggedBatch | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query (1, h, t, e), key and value (1, g, t, e) -> (1, t, h, e), each sequence attending to its own context.

    softcap: largest size of a score; scores are brought below it smoothly (Gemma 2).
    """
    if polylens_batch is None:
        raise InternalError("the text model was called without its ragged batch")
    _refuse_unsupported(kwargs, attention_mask)
    batch, layer = polylens_batch, int(module.layer_idx)  # type: ignore[arg-type]
    source = _layer_of_keys(module, layer)
    if source == layer and not batch.keys_are_written:
        batch.store.write(layer, batch.write_slots_t, key[0].transpose(0, 1), value[0].transpose(0, 1))
    if batch.only_keys:
        raise KeysWrittenError
    if (scale := getattr(module, _QUERY_SCALE, None)) is not None:
        query = query * scale(batch.positions_t(query.device))[:, None].to(query.dtype)
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    reach = replace(Reach.of(module, layer, sliding_window), spans_whole=batch.spans_beyond_windows)
    done = frozenset() if softcap else _attend_decoding(query, out, batch, source, scaling, reach)
    for index, rows in enumerate(batch.sequences):
        if index in done:
            continue
        q = query[:, :, rows.start : rows.stop]
        attended = _attend(q, key, value, batch, index, source, scaling, reach, softcap)
        out[:, rows.start : rows.stop] = attended.transpose(1, 2)
    return out, None


def _layer_of_keys(module: torch.nn.Module, layer: int) -> int:
    """The layer whose keys and values this one attends to: the last of its kind that has any of its own (Gemma)."""
    if not getattr(module, "is_kv_shared_layer", False):
        return layer
    config: Any = module.config
    kinds = config.layer_types
    return max(i for i in range(len(kinds) - config.num_kv_shared_layers) if kinds[i] == kinds[layer])


def _attend_decoding(
    query: torch.Tensor,
    out: torch.Tensor,
    batch: RaggedBatch,
    layer: int,
    scaling: float | None,
    reach: Reach,
) -> frozenset[int]:
    """Attention of all sequences that decode, by the compiled kernel; which they are (none without the kernel)."""
    if batch.kernels is None or query.dtype is not torch.float32 or query.stride(-1) != 1:
        return frozenset()
    # A first token has no cached context: rare, and the general way needs no page for it.
    done = {i: rows for i, rows in enumerate(batch.sequences) if rows.num_rows == 1 and rows.first_position > 0}
    if done:
        keys_sge, values_sge = batch.store.layer(layer)
        seen = [(rows.start, reach.seen_by_last(rows)) for rows in done.values()]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        batch.kernels.decode_attention_(out[0], query[0].transpose(0, 1), keys_sge, values_sge, seen, scale)
    return frozenset(done)


def _attend(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: RaggedBatch,
    index: int,
    layer: int,
    scaling: float | None,
    reach: Reach,
    softcap: float | None,
) -> torch.Tensor:
    """One sequence's attention: (1, h, n, e) queries -> (1, h, n, e)."""
    rows = batch.sequences[index]
    slots_c = rows.slots_c
    if rows.num_rows == 1:
        slots_c = reach.seen_by_last(rows)  # a single query needs no mask
    if rows.first_position == 0:
        k, v = key[:, :, rows.start : rows.stop], value[:, :, rows.start : rows.stop]
    else:
        k, v = (x.transpose(0, 1)[None] for x in batch.store.read(layer, slots_c))
    cache_key = (index, reach)
    if cache_key not in batch.masks:
        spans = () if batch.spans_in_windows_only and reach.window is None else rows.spans
        batch.masks[cache_key] = attention_mask_nc(replace(rows, spans=spans), reach, q.device)
    mask = batch.masks[cache_key]
    if softcap:
        return _capped_attention(q, k, v, mask, scaling, softcap)
    causal = mask is None and rows.num_rows > 1
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    )


def _capped_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask_nc: torch.Tensor | None,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """As scaled_dot_product_attention, which knows no cap; mask None: causal, the last query sees all keys."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    if mask_nc is None:
        n, c = scores.shape[-2:]
        mask_nc = torch.ones(n, c, dtype=torch.bool, device=q.device).tril(c - n)
    scores = scores.masked_fill(~mask_nc, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def attention_mask_nc(rows: SequenceRows, reach: Reach, device: torch.device) -> torch.Tensor | None:
    """Which context tokens (c) each new row (n) sees: causal or in the same span, and within the layer's reach.

    None where plain causal attention (the whole sequence is new), or no mask at all (one row), says the same.
    """
    n, c, first = rows.num_rows, rows.num_context, rows.first_position
    spans = [(a, b) for a, b in rows.spans if b > first and a < c and b - a > 1]
    narrow = reach.first_seen(c - 1) > 0
    if n == 1:  # the last token: no span reaches beyond it, and what is out of its reach was left out
        return None
    if first == 0 and not spans and not narrow:
        return None
    q_pos = torch.arange(first, c, device=device)[:, None]
    k_pos = torch.arange(c, device=device)[None]
    causal, near = k_pos <= q_pos, _near(q_pos, k_pos, reach, rows.num_prompt)
    together = torch.zeros_like(causal)
    for a, b in spans:
        together |= (q_pos >= a) & (q_pos < b) & (k_pos >= a) & (k_pos < b)
    together &= ~(_within(q_pos, rows.holes) | _within(k_pos, rows.holes))
    return (causal & near) | together if reach.spans_whole else (causal | together) & near


def _near(q_pos: torch.Tensor, k_pos: torch.Tensor, reach: Reach, num_prompt: int) -> torch.Tensor:
    near = torch.ones(q_pos.shape[0], k_pos.shape[1], dtype=torch.bool, device=q_pos.device)
    if reach.window is not None:
        in_window = k_pos > q_pos - reach.window
        near &= in_window | (k_pos < num_prompt) if reach.keeps_prompt else in_window
    if reach.chunk is not None:
        near &= k_pos // reach.chunk == q_pos // reach.chunk
    return near


def _within(positions: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    found = torch.zeros_like(positions, dtype=torch.bool)
    for start, stop in ranges:
        found = found | ((positions >= start) & (positions < stop))
    return found


def _refuse_unsupported(kwargs: dict[str, Any], attention_mask: torch.Tensor | None) -> None:
    if attention_mask is not None:
        raise InternalError("transformers built an attention mask for the ragged text model")
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and name not in _UNUSED_TENSORS:
            raise ModelLoadError(f"this model's text attention uses {name!r}, which polylens does not serve yet")
