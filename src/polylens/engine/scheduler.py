"""Which tokens of which sequences each step computes, and which pages they get.

Every running sequence has tokens left to compute: one while it decodes, more while it is in prefill (also
after a preemption, when its generated tokens are computed again). A step takes the decodes first, then chunks
of prefill in order of admission, within a budget of tokens. Who is admitted next is the `FairQueue`'s to say,
within what the `AdapterGate` lets through.

When pages are short, idle pages of the prefix cache go first; then the last-admitted running sequence is
preempted: its pages are given back and it is computed again later. No step is empty while there is work, but
where all of it waits for adapters: the first-admitted sequence may preempt all others, and one that cannot fit
alone is refused at `add`.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from polylens.engine.fair_queue import FairQueue
from polylens.engine.pages import pages_for
from polylens.engine.sequence import SequenceState
from polylens.errors import InternalError, PromptTooLongError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polylens.engine.pages import PageAllocator
    from polylens.engine.prefix_cache import PrefixCache
    from polylens.engine.sequence import MediaSpan, Sequence


class AdapterGate(Protocol):
    """Says whether a sequence's adapter is where steps can use it (`AdapterStore`), and keeps it there."""

    def enter(self, seq: Sequence) -> bool:
        """Keep the adapter in place until `leave`; False: it is not there yet, ask again in a later step."""

    def leave(self, seq: Sequence) -> None:
        """The sequence takes part in no step until it enters again."""


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


class _Draft:
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


class Scheduler:
    """Decides steps; owns the sequences' states and page tables.

    page_tokens: tokens a page holds. max_step_tokens: tokens in one step (exceeded only by a bidirectional span
    that is longer: it runs alone). max_running: sequences that hold pages at a time.

    Use: `plan = schedule()`, compute it, `on_computed(plan)`, then append the new tokens to the sequences and
    `finish` those that end. A plan that was not computed (the step failed) is simply not reported: its entries
    come again.
    """

    def __init__(
        self,
        *,
        page_tokens: int,
        max_step_tokens: int,
        max_running: int,
        allocator: PageAllocator,
        prefix_cache: PrefixCache | None = None,
        queue: FairQueue | None = None,
        gate: AdapterGate | None = None,
    ) -> None:
        if min(page_tokens, max_step_tokens, max_running) < 1:
            raise ValueError("page_tokens, max_step_tokens and max_running must be at least 1")
        self._page_tokens = page_tokens
        self._max_step_tokens = max_step_tokens
        self._max_running = max_running
        self._allocator = allocator
        self._prefix_cache = prefix_cache
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        """Prompt tokens of all sequences admitted so far; of these the prefix cache had `num_cached_tokens`."""
        self.num_cached_tokens = 0
        self._gate = gate
        self._num_admitted = 0
        # Both in order of first admission.
        self._running: list[Sequence] = []
        self._preempted: list[Sequence] = []
        self._queue = queue if queue is not None else FairQueue()
        """Those never admitted; they come after the preempted ones."""
        self._decodes_postponed = False

    # ---- what the engine calls

    @property
    def allocator(self) -> PageAllocator:
        return self._allocator

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return (*self._preempted, *self._queue)

    def has_unfinished(self) -> bool:
        return bool(self._running or self._preempted or len(self._queue))

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence; PromptTooLongError if prompt and answer would not fit with all else removed."""
        # The last generated token is never computed, so it needs no place.
        longest = seq.num_prompt_tokens + seq.sampling.max_tokens - 1
        needed, existing = pages_for(longest, self._page_tokens), self._allocator.num_pages
        if needed > existing:
            raise PromptTooLongError(
                f"{seq.num_prompt_tokens} prompt tokens and up to {seq.sampling.max_tokens} new ones need {needed} KV "
                f"pages of {existing}; shorten the prompt, lower max_tokens or raise kv_bytes",
                param="max_tokens",
            )
        self._queue.add(seq)

    def schedule(self) -> StepPlan:
        """The next step, its pages allocated. Empty only when all unfinished sequences wait for their adapters."""
        draft = _Draft(self._max_step_tokens)
        self._plan_decodes(draft)
        self._plan_prefills(draft)
        if not draft.entries and self._running:
            raise InternalError("the scheduler found no work although sequences are unfinished")
        return draft.plan()

    def on_computed(self, plan: StepPlan) -> None:
        """The plan's KV is stored. Entries of sequences aborted since are passed over."""
        for entry in plan.entries:
            seq = entry.seq
            if seq.state is not SequenceState.RUNNING:
                continue
            if seq.num_computed != entry.start:
                raise InternalError(
                    f"{seq.request_id}: {seq.num_computed} tokens computed, step began at {entry.start}"
                )
            seq.num_computed = entry.stop
            if self._prefix_cache is not None:
                self._prefix_cache.insert(seq)

    def abort(self, seq: Sequence) -> None:
        """End a sequence in any state, giving back its pages; one that has ended already is left alone."""
        if seq.state is SequenceState.RUNNING:
            self._running.remove(seq)
            self._give_back(seq)
        elif seq in self._preempted:
            self._preempted.remove(seq)
        elif seq.state is SequenceState.WAITING:
            self._queue.remove(seq)
        seq.state = SequenceState.FINISHED

    # ---- planning

    def _plan_decodes(self, draft: _Draft) -> None:
        for seq in tuple(self._running):
            if draft.budget == 0:
                return
            # A sequence later in the list may have been preempted for one before it.
            decodes = seq.state is SequenceState.RUNNING and seq.num_remaining == 1
            if decodes and self._make_room(seq, seq.num_tokens, draft):
                draft.add(seq, seq.num_tokens)

    def _plan_prefills(self, draft: _Draft) -> None:
        for seq in tuple(self._running):
            if draft.budget == 0:
                return
            if seq.state is SequenceState.RUNNING and seq.num_remaining > 1 and self._plan_chunk(seq, draft):
                return
        # No admission after a preemption: the pages were needed by someone else.
        while len(self._running) < self._max_running and draft.budget > 0 and not draft.preempted:
            admitted = self._next_through_gate()
            if admitted is None or not self._admit(admitted) or self._plan_chunk(admitted, draft):
                return

    def _next_through_gate(self) -> Sequence | None:
        """The waiting sequence that should run next among those whose adapter is in place; the gate keeps it there."""
        for seq in (*self._preempted, *self._queue.candidates()):
            if self._gate is None or self._gate.enter(seq):
                return seq
        return None

    def _plan_chunk(self, seq: Sequence, draft: _Draft) -> bool:
        """Plan the next chunk of a sequence in prefill, if it can have one. True: nothing may be added after it."""
        start = seq.num_computed
        stop = self._chunk_stop(seq, start + draft.budget)
        if stop == start:
            return self._plan_span_alone(seq, draft)
        # A shorter chunk is better than preempting someone.
        fitting = (len(seq.page_table) + self._num_available()) * self._page_tokens
        shorter = self._chunk_stop(seq, min(stop, fitting))
        if shorter > start:
            stop = shorter
        if self._make_room(seq, stop, draft):
            draft.add(seq, stop)
        return False

    def _plan_span_alone(self, seq: Sequence, draft: _Draft) -> bool:
        """Give a whole step to a bidirectional span that the budget left by others, or any budget, is too small for."""
        if draft.num_prefills:
            return False
        if draft.entries and self._decodes_postponed:
            # Decodes were put off for a span already: now it is their turn.
            self._decodes_postponed = False
            return False
        span = seq.span_cut_by(seq.num_computed + 1)
        if span is None:
            raise InternalError(f"{seq.request_id}: no chunk possible at {seq.num_computed}, which starts no span")
        if not self._make_room(seq, span[1], draft):
            return False
        self._decodes_postponed = bool(draft.entries)
        draft.entries.clear()
        draft.add(seq, span[1])
        return True

    def _chunk_stop(self, seq: Sequence, limit: int) -> int:
        """The last position up to `limit` where a chunk of `seq` may end; its start when there is none."""
        stop = min(seq.num_tokens, limit)
        cut = seq.span_cut_by(stop)
        return cut[0] if cut is not None else max(stop, seq.num_computed)

    # ---- pages

    def _admit(self, seq: Sequence) -> bool:
        """Make a waiting sequence run, with what the prefix cache has of it; False if pages are short."""
        found = self._prefix_cache.lookup(seq) if self._prefix_cache is not None else []
        missing = pages_for(seq.num_tokens, self._page_tokens) - len(found)
        if self._running and missing > self._num_available() - self._num_promised():
            self._release(found)
            self._leave_gate(seq)
            return False
        self._take_from_waiting(seq)
        insort(self._running, seq, key=lambda one: one.turn)
        seq.state = SequenceState.RUNNING
        seq.page_table = found
        seq.num_computed = len(found) * self._page_tokens
        seq.num_offered_pages = len(found)
        if seq.num_preemptions == 0:
            seq.cached_tokens = seq.num_computed
            self.num_prompt_tokens += seq.num_prompt_tokens
            self.num_cached_tokens += seq.cached_tokens
        return True

    def _take_from_waiting(self, seq: Sequence) -> None:
        if seq in self._preempted:
            self._preempted.remove(seq)
            return
        self._queue.take(seq)
        seq.turn = self._num_admitted
        self._num_admitted += 1

    def _leave_gate(self, seq: Sequence) -> None:
        if self._gate is not None:
            self._gate.leave(seq)

    def _make_room(self, seq: Sequence, num_tokens: int, draft: _Draft) -> bool:
        """Give `seq` pages for its first `num_tokens` tokens, preempting those admitted later if need be."""
        missing = pages_for(num_tokens, self._page_tokens) - len(seq.page_table)
        while missing > self._num_available():
            if self._running[-1] is seq:
                # It keeps what it has; those before it end, or preempt it.
                return False
            self._preempt(self._running[-1], draft)
        if missing > 0:
            seq.page_table += self._take(missing)
        return True

    def _preempt(self, seq: Sequence, draft: _Draft) -> None:
        draft.drop(seq)
        draft.preempted = True
        self._running.remove(seq)
        self._give_back(seq)
        seq.state = SequenceState.WAITING
        seq.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._preempted, seq, key=lambda one: one.turn)

    def _give_back(self, seq: Sequence) -> None:
        self._leave_gate(seq)
        self._release(seq.page_table)
        seq.carried = None
        seq.page_table = []
        seq.num_computed = 0
        seq.num_offered_pages = 0

    def _num_available(self) -> int:
        """Pages that can be had without preempting anyone."""
        return self._allocator.num_free + (self._prefix_cache.num_evictable if self._prefix_cache is not None else 0)

    def _num_promised(self) -> int:
        """Pages the running sequences still need for their known tokens, and one more each to grow into."""
        return sum(pages_for(seq.num_tokens, self._page_tokens) + 1 - len(seq.page_table) for seq in self._running)

    def _take(self, count: int) -> list[int]:
        short = count - self._allocator.num_free
        if short > 0 and self._prefix_cache is not None:
            self._prefix_cache.evict(short)
        return self._allocator.allocate(count)

    def _release(self, pages: list[int]) -> None:
        if self._prefix_cache is not None:
            self._prefix_cache.release(pages)
        else:
            self._allocator.free(pages)

    # ---- checks

    def check_integrity(self) -> None:
        """Raise InternalError if the sequences, the allocator and the prefix cache do not agree."""
        self._allocator.check_integrity()
        kept: Iterable[int] = ()
        if self._prefix_cache is not None:
            self._prefix_cache.check_integrity()
            kept = self._prefix_cache.kept_pages()
        users = [0] * self._allocator.num_pages
        for page in [*kept, *(page for seq in self._running for page in seq.page_table)]:
            users[page] += 1
        for page, count in enumerate(users):
            if count != self._allocator.users(page):
                raise InternalError(f"page {page}: {count} users, {self._allocator.users(page)} counted")
        self._check_order()
        for seq in self._running:
            self._check_running(seq)

    def _check_order(self) -> None:
        for sequences in (self._running, self._preempted):
            turns = [seq.turn for seq in sequences]
            if turns != sorted(set(turns)):
                raise InternalError(f"sequences out of order of admission: {turns}")
        states = [(seq, SequenceState.RUNNING) for seq in self._running]
        states += [(seq, SequenceState.WAITING) for seq in self.waiting]
        for seq, state in states:
            if seq.state is not state:
                raise InternalError(f"{seq.request_id}: {seq.state} in the list of {state}")
        for seq in self.waiting:
            if seq.page_table or seq.num_computed or seq.carried is not None:
                raise InternalError(f"{seq.request_id}: waits but holds pages")

    def _check_running(self, seq: Sequence) -> None:
        if len(set(seq.page_table)) != len(seq.page_table):
            raise InternalError(f"{seq.request_id}: a page twice in {seq.page_table}")
        if pages_for(seq.num_computed, self._page_tokens) > len(seq.page_table):
            raise InternalError(f"{seq.request_id}: {seq.num_computed} tokens in {len(seq.page_table)} pages")
        if seq.carried is not None and seq.carried.num_tokens != seq.num_computed:
            raise InternalError(f"{seq.request_id}: a state of {seq.carried.num_tokens} of {seq.num_computed} tokens")
        if seq.num_computed > seq.num_tokens or seq.span_cut_by(seq.num_computed):
            raise InternalError(f"{seq.request_id}: {seq.num_computed} of {seq.num_tokens} tokens computed")
