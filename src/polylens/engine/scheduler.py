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
from typing import TYPE_CHECKING, Protocol

from polylens.engine.fair_queue import FairQueue
from polylens.engine.page_pool import PagePool
from polylens.engine.sequence import SequenceState
from polylens.engine.step_plan import StepDraft, StepPlan
from polylens.errors import InternalError, PromptTooLongError

if TYPE_CHECKING:
    from polylens.engine.pages import PageAllocator
    from polylens.engine.prefix_cache import PrefixCache
    from polylens.engine.sequence import Sequence


class AdapterGate(Protocol):
    """Says whether a sequence's adapter is where steps can use it (`AdapterStore`), and keeps it there."""

    def enter(self, seq: Sequence) -> bool:
        """Keep the adapter in place until `leave`; False: it is not there yet, ask again in a later step."""

    def leave(self, seq: Sequence) -> None:
        """The sequence takes part in no step until it enters again."""


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
        self.pages = PagePool(page_tokens, allocator, prefix_cache)
        self._max_step_tokens = max_step_tokens
        self._max_running = max_running
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
        needed, existing = self.pages.for_tokens(longest), self.pages.num_pages
        if needed > existing:
            raise PromptTooLongError(
                f"{seq.num_prompt_tokens} prompt tokens and up to {seq.sampling.max_tokens} new ones need {needed} KV "
                f"pages of {existing}; shorten the prompt, lower max_tokens or raise kv_bytes",
                param="max_tokens",
            )
        self._queue.add(seq)

    def schedule(self) -> StepPlan:
        """The next step, its pages allocated. Empty only when all unfinished sequences wait for their adapters."""
        draft = StepDraft(self._max_step_tokens)
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
            self.pages.remember(seq)

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

    def _plan_decodes(self, draft: StepDraft) -> None:
        for seq in tuple(self._running):
            if draft.budget == 0:
                return
            # A sequence later in the list may have been preempted for one before it.
            decodes = seq.state is SequenceState.RUNNING and seq.num_remaining == 1
            if decodes and self._make_room(seq, seq.num_tokens, draft):
                draft.add(seq, seq.num_tokens)

    def _plan_prefills(self, draft: StepDraft) -> None:
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

    def _plan_chunk(self, seq: Sequence, draft: StepDraft) -> bool:
        """Plan the next chunk of a sequence in prefill, if it can have one. True: nothing may be added after it."""
        start = seq.num_computed
        stop = self._chunk_stop(seq, start + draft.budget)
        if stop == start:
            return self._plan_span_alone(seq, draft)
        # A shorter chunk is better than preempting someone.
        fitting = (len(seq.page_table) + self.pages.num_available) * self.pages.page_tokens
        shorter = self._chunk_stop(seq, min(stop, fitting))
        if shorter > start:
            stop = shorter
        if self._make_room(seq, stop, draft):
            draft.add(seq, stop)
        return False

    def _plan_span_alone(self, seq: Sequence, draft: StepDraft) -> bool:
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
        found = self.pages.known(seq)
        missing = self.pages.for_tokens(seq.num_tokens) - len(found)
        if self._running and missing > self.pages.num_available - self._num_promised():
            self.pages.release(found)
            self._leave_gate(seq)
            return False
        self._take_from_waiting(seq)
        insort(self._running, seq, key=lambda one: one.turn)
        seq.state = SequenceState.RUNNING
        seq.page_table = found
        seq.num_computed = len(found) * self.pages.page_tokens
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

    def _make_room(self, seq: Sequence, num_tokens: int, draft: StepDraft) -> bool:
        """Give `seq` pages for its first `num_tokens` tokens, preempting those admitted later if need be."""
        missing = self.pages.for_tokens(num_tokens) - len(seq.page_table)
        while missing > self.pages.num_available:
            if self._running[-1] is seq:
                # It keeps what it has; those before it end, or preempt it.
                return False
            self._preempt(self._running[-1], draft)
        if missing > 0:
            seq.page_table += self.pages.take(missing)
        return True

    def _preempt(self, seq: Sequence, draft: StepDraft) -> None:
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
        self.pages.release(seq.page_table)
        seq.carried = None
        seq.page_table = []
        seq.num_computed = 0
        seq.num_offered_pages = 0

    def _num_promised(self) -> int:
        """Pages the running sequences still need for their known tokens, and one more each to grow into."""
        return sum(self.pages.for_tokens(seq.num_tokens) + 1 - len(seq.page_table) for seq in self._running)

    # ---- checks

    def check_integrity(self) -> None:
        """Raise InternalError if the sequences, the allocator and the prefix cache do not agree."""
        self.pages.check_integrity(page for seq in self._running for page in seq.page_table)
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
        if self.pages.for_tokens(seq.num_computed) > len(seq.page_table):
            raise InternalError(f"{seq.request_id}: {seq.num_computed} tokens in {len(seq.page_table)} pages")
        if seq.carried is not None and seq.carried.num_tokens != seq.num_computed:
            raise InternalError(f"{seq.request_id}: a state of {seq.carried.num_tokens} of {seq.num_computed} tokens")
        if seq.num_computed > seq.num_tokens or seq.span_cut_by(seq.num_computed):
            raise InternalError(f"{seq.request_id}: {seq.num_computed} of {seq.num_tokens} tokens computed")
