"""Turn a step plan into one call of the text model: rows, positions, slots, adapters, and back to logits."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from polylens.errors import InternalError
from polylens.lora.routing import segments
from polylens.models.attention import RaggedBatch, SequenceRows
from polylens.models.text import MediaRows, TextRunner

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from polylens.engine.kv import PagedKV
    from polylens.engine.step_plan import StepEntry
    from polylens.lora.context import RoutingContext
    from polylens.models.features import ItemFeatures
    from polylens.models.recurrent import CarriedState
    from polylens.native import Kernels


class Runner:
    """Runs the text model over the entries of a step (prefill chunks and decodes mixed)."""

    def __init__(self, text: TextRunner, kv: PagedKV, context: RoutingContext, kernels: Kernels | None = None) -> None:
        self._text = text
        self._kv = kv
        self._context = context
        self._kernels = kernels

    def run(self, entries: Sequence[StepEntry], features: Mapping[str, ItemFeatures]) -> torch.Tensor:
        """Compute the entries; returns (s, vocab) float32 logits of those that reach their sequence's end.

        features: by vision key, for every media token within the entries.
        """
        device = self._text.device
        media = _media_rows(entries, features)
        ids_t = torch.tensor([token for entry in entries for token in entry.token_ids], device=device)
        positions = torch.cat([_positions(e) for e in entries], dim=1).to(device)
        batch = self._ragged_batch(entries)
        token_segments = segments([entry.num_tokens for entry in entries], [entry.seq.adapter for entry in entries])
        sampling = [entry.seq.adapter for entry in entries if entry.samples]
        head_segments = segments([1] * len(sampling), sampling)
        with self._context.text(token_segments, head_segments), self._advanced(entries):
            return self._text.logits(self._text.forward(ids_t, positions, batch, media))

    def _advanced(self, entries: Sequence[StepEntry]) -> ExitStack:
        """Around the computation of the entries: the states that their sequences carry go from start to stop."""
        stack = ExitStack()
        for entry in entries:
            if entry.seq.carried is not None:
                stack.enter_context(entry.seq.carried.advanced(entry.start, entry.stop))
        return stack

    def _carried(self, entries: Sequence[StepEntry]) -> list[CarriedState]:
        if not self._text.carries_state:
            return []
        for entry in entries:
            entry.seq.carried = entry.seq.carried or self._text.new_state()
        return [entry.seq.carried for entry in entries if entry.seq.carried is not None]

    def _ragged_batch(self, entries: Sequence[StepEntry]) -> RaggedBatch:
        rows, writes, start_row = [], [], 0
        for entry in entries:
            slots_c = self._kv.slots(entry.seq.page_table, 0, entry.stop)
            stop_row = start_row + entry.num_tokens
            seq = entry.seq
            spans, num_prompt = seq.bidirectional_spans, seq.num_prompt_tokens
            rows.append(SequenceRows(start_row, stop_row, slots_c, spans, num_prompt, seq.span_holes))
            writes.append(slots_c[entry.start :])
            start_row = stop_row
        return RaggedBatch(
            rows,
            torch.cat(writes),
            self._kv,
            self._text.two_way_in_windows_only,
            self._text.two_way_beyond_windows,
            carried=self._carried(entries),
            only_rows=self._context.only_rows,
            wanted=[row.stop - 1 for row, entry in zip(rows, entries, strict=True) if entry.samples],
            kernels=self._kernels,
        )


def _positions(entry: StepEntry) -> torch.Tensor:
    """Rotary positions of the entry's tokens, (rows, n): the prompt's as given, then index + delta."""
    seq = entry.seq
    if seq.positions is None:
        raise InternalError(f"{seq.request_id}: has no positions")
    known = seq.positions[:, entry.start : entry.stop]
    if known.shape[1] == entry.num_tokens:
        return known
    after = torch.arange(entry.start + known.shape[1], entry.stop) + seq.position_delta
    return torch.cat([known, after.expand(known.shape[0], -1)], dim=1)


def _media_rows(entries: Sequence[StepEntry], features: Mapping[str, ItemFeatures]) -> MediaRows | None:
    """Which rows of the step receive which feature rows, in row order."""
    rows: list[torch.Tensor] = []
    parts: list[tuple[ItemFeatures, slice]] = []
    first_row = 0
    for entry in entries:
        for span in entry.media:
            rows.append(torch.arange(span.start, span.stop) + first_row - entry.start)
            parts.append((features[span.vision_key], slice(span.offset_in_item, span.offset_in_item + span.length)))
        first_row += entry.num_tokens
    if not rows:
        return None
    num_levels = len(parts[0][0].deepstack)
    return MediaRows(
        rows_t=torch.cat(rows),
        features_td=torch.cat([item.rows[cut] for item, cut in parts]),
        deepstack=tuple(torch.cat([item.deepstack[level][cut] for item, cut in parts]) for level in range(num_levels)),
    )
