"""The requests between being taken in and their end, as the engine's thread sees them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from polylens.engine.handle import Queued
from polylens.engine.outbox import Outbox
from polylens.errors import AbortedError, DeadlineError, InternalError, PolylensError

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable

    from polylens.core import CompletionDelta
    from polylens.engine.engine import Engine, StepOutput
    from polylens.engine.handle import RequestHandle
    from polylens.engine.prepare import PreparedRequest


class InFlight:
    """The handles of the requests that have not ended. All but `add` and what only looks is for the engine's thread.

    lock: guards which requests there are; notified when one ends.
    """

    def __init__(self, engine: Engine, lock: threading.Condition) -> None:
        self._engine = engine
        self._lock = lock
        self._handles: dict[str, RequestHandle] = {}
        self._outbox = Outbox()
        self._followers: dict[RequestHandle, list[tuple[RequestHandle, PreparedRequest]]] = {}
        """By the first copy of a request, the others while they wait for its prompt to be computed."""

    def __len__(self) -> int:
        return len(self._handles)

    def __contains__(self, request_id: str | None) -> bool:
        return request_id in self._handles

    def all(self) -> list[RequestHandle]:
        with self._lock:
            return list(self._handles.values())

    def seconds_to_deadline(self) -> float | None:
        """Until the first of them is overdue; None: they have all the time."""
        deadlines = [handle.deadline for handle in self.all() if handle.deadline is not None]
        return max(min(deadlines) - time.monotonic(), 0.0) if deadlines else None

    # ---- on their way

    def add(self, handles: Iterable[RequestHandle]) -> None:
        """Take requests in. Lock held."""
        self._handles.update({handle.request_id: handle for handle in handles})

    def queue(self, handles: list[RequestHandle], copies: list[PreparedRequest]) -> None:
        """Queue the first copy; the others follow when its prompt is computed, and find it in the prefix cache."""
        pairs = [pair for pair in zip(handles, copies, strict=True) if pair[0].times.ended is None]
        for handle, prepared in pairs:
            handle.times.queued = time.monotonic()
            handle.prompt_tokens, handle.processing = len(prepared.prompt.token_ids), prepared.processing
        if len(pairs) > 1 and self._engine.prefix_cache is not None:
            self._followers[pairs[0][0]] = pairs[1:]
            pairs = pairs[:1]
        self._enqueue(pairs)

    def _enqueue(self, pairs: list[tuple[RequestHandle, PreparedRequest]]) -> None:
        for handle, prepared in pairs:
            if handle.times.ended is not None:
                continue
            try:
                self._engine.enqueue(prepared, handle.lease, handle.request_id)
            except PolylensError as error:
                self.end(handle, error)
                continue
            for one in (handle, *(follower for follower, _ in self._followers.get(handle, ()))):
                self._outbox.put(one, Queued())

    def take_outputs(self, outputs: Iterable[StepOutput]) -> None:
        """Note what a step began, and pass on what it gave."""
        self._note_admitted()
        for output in outputs:
            handle = self._handles.get(output.request_id)
            if handle is None:
                raise InternalError(f"a step's output for {output.request_id!r}, which nobody submitted")
            if output.error is not None:
                self.end(handle, output.error)
            elif output.delta is not None:
                self._pass_on(handle, output.delta)

    def _note_admitted(self) -> None:
        for seq in self._engine.scheduler.running:
            handle = self._handles.get(seq.request_id)
            if handle is not None and handle.times.admitted is None:
                handle.times.admitted = time.monotonic()

    def _pass_on(self, handle: RequestHandle, delta: CompletionDelta) -> None:
        times, now = handle.times, time.monotonic()
        times.admitted = times.admitted or now
        times.first_token = times.first_token or now
        self._enqueue(self._followers.pop(handle, []))
        if delta.completion is not None:
            self._forget(handle)
        self._outbox.put(handle, delta)

    # ---- their end

    def end(self, handle: RequestHandle, error: PolylensError) -> None:
        """End a request wherever it is, freeing what it holds; nothing happens if it has ended."""
        if handle.times.ended is None:
            self._engine.abort(handle.request_id)
            self._forget(handle)
            self._outbox.put(handle, error)
            self._enqueue(self._followers.pop(handle, []))

    def abort(self, handle: RequestHandle) -> None:
        self.end(handle, AbortedError(f"{handle.request_id} was aborted"))

    def end_all(self, handles: Iterable[RequestHandle], error: PolylensError) -> None:
        for handle in handles:
            self.end(handle, error)

    def end_overdue(self) -> None:
        now = time.monotonic()
        for handle in self.all():
            if handle.deadline is not None and handle.deadline <= now:
                waited = now - handle.times.submitted
                self.end(handle, DeadlineError(f"the request was not done within its deadline ({waited:.1f} s)"))

    def fail(self, error: PolylensError) -> None:
        """End all without a call of the engine, whose state is not to be trusted any more."""
        for handle in self.all():
            self._forget(handle)
            self._outbox.put(handle, error)
        self._followers.clear()

    def _forget(self, handle: RequestHandle) -> None:
        handle.times.ended = time.monotonic()
        # The engine has released it where the request got that far; releasing twice does nothing.
        handle.lease.release()
        with self._lock:
            del self._handles[handle.request_id]
            self._lock.notify_all()

    def flush(self) -> None:
        """Hand the events of this turn to their loops, one call a loop."""
        for handle in self._outbox.flush():
            self.end(handle, AbortedError("the loop of the request's caller is closed"))
            self._outbox.drop(handle.loop)

    def check_integrity(self) -> None:
        """Raise InternalError unless copies wait only for a request that is under way."""
        if any(first.times.ended is not None for first in self._followers):
            raise InternalError("copies of a request wait for one that has ended")
