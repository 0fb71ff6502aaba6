"""What one step computes: chunks of sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polylens.engine.sequence import MediaSpan, Sequence


@dataclass(frozen=True)
class StepEntry:
    """Compute tokens [start, stop) of `seq`, storing their KV in the pages of `seq.page_table`.

    samples: the newest token is among them, so the last row's logits choose the next token.
    """

    seq: Sequence
    start: int
    stop: int
    samples: bool

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def token_ids(self) -> list[int]:
        return self.seq.token_ids[self.start : self.stop]

    @property
    def media(self) -> tuple[MediaSpan, ...]:
        """The media rows this chunk needs (positions count from the prompt's start, not the chunk's)."""
        return self.seq.media_in(self.start, self.stop)


@dataclass(frozen=True)
class StepPlan:
    """One step: its entries, ordered so that those of one adapter are neighbours, the base model first."""

    entries: tuple[StepEntry, ...]

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)


class StepDraft:
    """A plan in the making."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.preempted = False
        self.entries: dict[Sequence, StepEntry] = {}
        self.num_prefills = 0

    def add(self, seq: Sequence, stop: int) -> None:
        entry = StepEntry(seq, seq.num_computed, stop, samples=stop == seq.num_tokens)
        self.entries[seq] = entry
        self.budget -= entry.num_tokens
        self.num_prefills += seq.num_remaining > 1

    def drop(self, seq: Sequence) -> None:
        entry = self.entries.pop(seq, None)
        if entry is not None:
            self.budget += entry.num_tokens
            self.num_prefills -= seq.num_remaining > 1

    def plan(self) -> StepPlan:
        entries = list(self.entries.values())
        groups: dict[object, int] = {None: 0}
        for entry in entries:
            groups.setdefault(entry.seq.adapter, len(groups))
        return StepPlan(tuple(sorted(entries, key=lambda entry: groups[entry.seq.adapter])))
