"""The state of one request while the engine runs it. Knows tokens and page ids, no tensors of the model."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from polylens.core import Adapter, SamplingParams
    from polylens.engine.logit_rules import LogitRules
    from polylens.models.recurrent import CarriedState


class Lease(Protocol):
    """Keeps an adapter alive while a sequence uses it (`adapter_store.StoreLease`)."""

    def release(self) -> None: ...


class SequenceState(StrEnum):
    WAITING = "waiting"
    """Holds no pages and nothing of it is computed: not started yet, or preempted."""
    RUNNING = "running"
    """Admitted: holds pages, and gets its turn in the steps."""
    FINISHED = "finished"
    """Ended, aborted or failed: holds no pages."""


@dataclass(frozen=True)
class MediaSpan:
    """A run of consecutive prompt positions that are fed by consecutive feature rows of one media item.

    start, length: positions in the prompt. item_index: which of the request's items. offset_in_item: the
    item's feature row that goes to position `start`. vision_key: content key of the item's features
    (media content, processor settings, digest of the vision deltas).
    """

    start: int
    length: int
    vision_key: str
    item_index: int
    offset_in_item: int

    @property
    def stop(self) -> int:
        return self.start + self.length

    def clip(self, start: int, stop: int) -> MediaSpan | None:
        """The part of the span within positions [start, stop), or None when they do not meet."""
        first, last = max(self.start, start), min(self.stop, stop)
        if first >= last:
            return None
        return MediaSpan(
            first, last - first, self.vision_key, self.item_index, self.offset_in_item + first - self.start
        )


@dataclass(eq=False)
class Sequence:
    """One request's tokens and what is computed of them. Compared by identity.

    The key-value (KV) vectors of token_ids[:num_computed] are stored in the pages of `page_table`: token t
    lies in page `page_table[t // page_tokens]`. The newest token is computed in the next step, which gives
    the logits of the token after it; so a running sequence that decodes has one token left to compute.

    media: sorted by start, not overlapping. bidirectional_spans: sorted (start, stop) runs of prompt positions that
    see each other and so must be computed in one chunk; span_holes: runs within them that do not. positions,
    position_delta: the prompt's position ids as the model border makes them, and what is added to the index of a
    generated token to get its position. cached_tokens: prompt tokens found in the prefix cache at the first admission.
    cache_salt: part of the keys under which the prefix cache keeps its pages. keeps_prompt: whether tokens that are
    generated see otherwise than those of a prompt (`Reach.keeps_prompt`). generator: this request's own source of
    random draws (None while greedy). logit_rules: what it does to its logits (None: nothing).
    """

    request_id: str
    adapter: Adapter | None
    prompt_ids: list[int]
    sampling: SamplingParams
    lease: Lease | None = None
    cache_salt: str = ""
    media: tuple[MediaSpan, ...] = ()
    bidirectional_spans: tuple[tuple[int, int], ...] = ()
    span_holes: tuple[tuple[int, int], ...] = ()
    positions: torch.Tensor | None = None
    position_delta: float = 0
    keeps_prompt: bool = False
    generator: torch.Generator | None = None
    logit_rules: LogitRules | None = None

    # Written by the scheduler and the prefix cache only.
    state: SequenceState = SequenceState.WAITING
    turn: int = 0
    """How many were admitted before this one was for the first time."""
    num_computed: int = 0
    page_table: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    num_preemptions: int = 0
    page_digests: list[bytes] = field(default_factory=list)
    """Prefix-cache keys of the full pages seen so far; tokens are only appended, so they never change."""
    num_offered_pages: int = 0
    """First pages of `page_table` that came from, or were already offered to, the prefix cache."""

    carried: CarriedState | None = None
    """What the model's layers remember of the computed tokens beside their KV, where they do (made by the runner,
    given up with the pages)."""

    output_ids: list[int] = field(default_factory=list, init=False)
    token_ids: list[int] = field(init=False)
    """Prompt and generated tokens."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens not computed yet: 1 for a sequence that decodes, more for one in prefill."""
        return len(self.token_ids) - self.num_computed

    def append(self, token_id: int) -> None:
        """Add a generated token; it is computed in a later step."""
        self.output_ids.append(token_id)
        self.token_ids.append(token_id)

    def media_in(self, start: int, stop: int) -> tuple[MediaSpan, ...]:
        """The media runs within positions [start, stop), cut to them."""
        first = bisect_right(self.media, start, key=lambda span: span.stop)
        found = []
        for span in self.media[first:]:
            part = span.clip(start, stop)
            if part is None:
                break
            found.append(part)
        return tuple(found)

    def span_cut_by(self, boundary: int) -> tuple[int, int] | None:
        """The bidirectional span that a chunk ending at `boundary` would cut in two, or None."""
        index = bisect_right(self.bidirectional_spans, boundary, key=lambda span: span[1])
        if index < len(self.bidirectional_spans) and self.bidirectional_spans[index][0] < boundary:
            return self.bidirectional_spans[index]
        return None
