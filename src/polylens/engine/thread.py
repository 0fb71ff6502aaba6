"""The engine in a thread of its own, for callers on asyncio loops.

Three kinds of threads: the engine's, which alone touches the engine's state and runs its steps; workers, which
prepare requests (render, tokenise, decode pictures) and read adapter files; and the callers' loops, which only
hand requests in and take answers out. Whatever must happen between two steps is posted to the engine's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from polylens.engine.copies import request_copies
from polylens.engine.handle import Queued, RequestHandle, RequestTimes
from polylens.engine.outbox import Outbox
from polylens.engine.stats import EngineStats, collect
from polylens.errors import (
    AbortedError,
    DeadlineError,
    EngineFailedError,
    InternalError,
    PolylensError,
    QueueFullError,
    RequestError,
    ShuttingDownError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from polylens.adapters.load import LoadReport
    from polylens.core import Request
    from polylens.engine.adapter_lease import Unloaded
    from polylens.engine.adapter_store import AdapterStore
    from polylens.engine.engine import Engine
    from polylens.engine.handle import Event
    from polylens.engine.prepare import PreparedRequest
    from polylens.models.loading import LoadedModel

T = TypeVar("T")

DEFAULT_MAX_QUEUE = 256
"""Requests that may wait beyond those that run: at a few requests a second already more than anyone waits for."""

DEFAULT_WORKERS = min(4, os.cpu_count() or 1)
"""Threads that prepare requests: decoding a picture leaves the interpreter free, the rest of it does not."""

STATS_INTERVAL_S = 0.1
"""How old a stats snapshot may get while steps run."""


class EngineThread:
    """Runs an engine, which is its own from here on: nobody else may call it.

    max_queue: requests taken in beyond the `max_running` that run together; more raise QueueFullError.
    adapters: find out the row rules and wrap the layers before the first request, so that loading an adapter
    later holds up no step. Use: `start`, then `submit` and the rest, at last `stop` (or `await drain`).
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_queue: int = DEFAULT_MAX_QUEUE,
        num_workers: int = DEFAULT_WORKERS,
        adapters: bool = True,
    ) -> None:
        self._engine = engine
        self._adapters = adapters
        self._max_in_flight = engine.max_running + max_queue
        self._ids = itertools.count()
        self._workers = ThreadPoolExecutor(num_workers, "polylens-prepare")
        self._loaders = ThreadPoolExecutor(1, "polylens-adapters")
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outbox = Outbox()
        self._followers: dict[RequestHandle, list[tuple[RequestHandle, PreparedRequest]]] = {}
        """By the first copy of a request, the others while they wait for its prompt to be computed."""
        self._thread = threading.Thread(target=self._run, name="polylens-engine", daemon=True)
        self._ready = threading.Event()
        self._stats = EngineStats()
        self._stats_at = 0.0
        self._tasks: set[asyncio.Task[int]] = set()
        """Unloads under way: a loop keeps only weak references to its tasks."""
        # Guarded by the lock, which is never held while anything slow happens.
        self._lock = threading.Condition()
        self._handles: dict[str, RequestHandle] = {}
        self._draining = False
        self._hurried = False
        self._stopped = False
        self._closed = False
        self._failure: EngineFailedError | None = None

    # ---- life

    def start(self) -> EngineThread:
        """Start the thread and wait until it is ready. Raises what made it fail."""
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure
        return self

    @property
    def loaded(self) -> LoadedModel:
        """The model; its tokenizer and its description may be used from any thread."""
        return self._engine.loaded

    @property
    def registry(self) -> AdapterStore:
        """The adapters, safe to use from any thread; to load or unload one, see below."""
        return self._engine.registry

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt plus answer."""
        return self._engine.max_model_len

    @property
    def ready(self) -> bool:
        """Whether new requests are taken: started, not failed, not draining."""
        return self._ready.is_set() and self._failure is None and not self._draining

    @property
    def failure(self) -> EngineFailedError | None:
        """Why the thread ended by itself, if it did."""
        return self._failure

    @property
    def stats(self) -> EngineStats:
        """The latest snapshot, at most about STATS_INTERVAL_S or one step old."""
        return self._stats

    @property
    def num_in_flight(self) -> int:
        """Requests taken in and not ended: being prepared, waiting or running."""
        return len(self._handles)

    def wait_idle(self, limit_s: float) -> bool:
        """Wait until no request is in flight (or the thread has failed), for so long at most; whether it is so."""
        with self._lock:
            return self._lock.wait_for(self._is_idle, timeout=limit_s)

    def _is_idle(self) -> bool:
        return not self._handles or self._failure is not None

    def stop(self, limit_s: float = 0.0) -> None:
        """Refuse new requests, let the others end for up to `limit_s` seconds, end the rest, stop the thread.

        Blocks; may be called several times. The rest end with ShuttingDownError.
        """
        with self._lock:
            self._draining = True
            self._lock.wait_for(lambda: self._hurried or self._is_idle(), timeout=limit_s)
        if self._thread.ident is not None:
            self._post_if_alive(self._stop)
            self._thread.join()
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._loaders.shutdown(wait=True, cancel_futures=True)

    def hurry(self) -> None:
        """Let a `stop` that waits for requests wait no longer."""
        with self._lock:
            self._hurried = True
            self._lock.notify_all()

    async def drain(self, limit_s: float) -> None:
        """`stop`, without blocking the loop."""
        await asyncio.to_thread(self.stop, limit_s)

    # ---- requests

    def submit(self, request: Request, *, deadline_s: float | None = None, allow_paths: bool = False) -> RequestHandle:
        """Take a request in; call it on a running asyncio loop. Preparing and answering go on elsewhere.

        deadline_s: seconds from now after which it ends with DeadlineError, wherever it is. allow_paths: whether
        media may name local files. Raises at once, with nothing taken in: UnknownAdapterError, QueueFullError,
        ShuttingDownError, EngineFailedError, RequestError (an id in use). What else is wrong with the request is
        raised by the handle.
        """
        return self.submit_copies(request, 1, deadline_s=deadline_s, allow_paths=allow_paths)[0]

    def submit_copies(
        self, request: Request, count: int, *, deadline_s: float | None = None, allow_paths: bool = False
    ) -> list[RequestHandle]:
        """`submit` for `count` answers to one request, which is prepared once: all are taken in, or none.

        Copy k draws from seed + k where there is a seed, and is called "ID-k" where the request has an id.
        """
        requests = request_copies(request, count)
        handles: list[RequestHandle] = []
        now = time.monotonic()
        deadline = None if deadline_s is None else now + deadline_s
        with self._lock:
            self._check_accepts(requests)
            # All copies answer for one adapter, whatever is loaded under its name meanwhile.
            leases = [self._engine.registry.lease(request.adapter) for _ in requests]
            for one, lease in zip(requests, leases, strict=True):
                name = one.request_id or f"request-{next(self._ids)}"
                handle = RequestHandle(name, one, lease, RequestTimes(now), deadline, self._ask_abort)
                self._handles[name] = handle
                handles.append(handle)
        self._workers.submit(self._prepare, handles, allow_paths)
        if deadline is not None:
            # The thread may be asleep, to be woken no later than the deadlines it knows.
            self._post_if_alive(_nothing)
        return handles

    def _check_accepts(self, requests: Sequence[Request]) -> None:
        if self._failure is not None:
            raise self._failure
        if self._draining or not self._ready.is_set():
            raise ShuttingDownError("the engine is not taking requests: it is starting or being stopped")
        if len(self._handles) + len(requests) > self._max_in_flight:
            raise QueueFullError(f"{len(self._handles)} requests are running or waiting already; try again later")
        for request in requests:
            if request.request_id in self._handles:
                raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")

    def _prepare(self, handles: list[RequestHandle], allow_paths: bool) -> None:
        """On a worker: prepare what all `handles` ask, and queue it for each."""
        if all(handle.times.ended is not None for handle in handles):
            return
        try:
            for handle in handles:
                handle.lease.read()
            first = handles[0]
            prepared = self._engine.prepare(first.request, adapter=first.lease.adapter, allow_paths=allow_paths)
        except Exception as error:  # noqa: BLE001  (it must reach the callers, whatever it is)
            failure = error if isinstance(error, PolylensError) else _internal(error)
            self._post_if_alive(lambda: self._end_all(handles, failure))
            return
        copies = [prepared.copy(handle.request) for handle in handles]
        self._post_if_alive(lambda: self._take_prepared(handles, copies))

    def _ask_abort(self, handle: RequestHandle) -> None:
        if handle.times.ended is None:
            self._post_if_alive(lambda: self._end(handle, AbortedError(f"{handle.request_id} was aborted")))

    # ---- between steps

    def call(self, fn: Callable[[], T]) -> Future[T]:
        """Run `fn` on the engine's thread between two steps; the future has its result or error.

        Raises EngineFailedError or ShuttingDownError when there is no thread to run it.
        """
        future: Future[T] = Future()
        self._post(lambda: self._fulfil(future, fn))
        return future

    async def run(self, fn: Callable[[Engine], T]) -> T:
        """`call` for loops: `fn` gets the engine, and must be short, as all requests wait for it."""
        return await asyncio.wrap_future(self.call(lambda: fn(self._engine)))

    async def check_integrity(self) -> None:
        """Raise InternalError unless the engine's pages, caches and requests agree."""
        await self.run(lambda engine: engine.check_integrity())

    async def load_adapter(
        self, name: str, path: str | Path, *, replace: bool = False, pinned: bool = False, prefetch: bool = False
    ) -> LoadReport:
        """Load an adapter while steps run (`AdapterStore.load`): files are read, checked and copied elsewhere."""
        await self.run(lambda engine: engine.prepare_for_adapters())
        store = self._engine.registry
        load = self._loaders.submit(store.load, name, path, replace=replace, pinned=pinned, prefetch=prefetch)
        return await asyncio.wrap_future(load)

    async def unload_adapter(self, name: str) -> int:
        """Forget an adapter, wait until the last request with it has ended, and free its memory and cache entries.

        Returns the bytes freed. New requests for the name are refused from the first moment, and all of it happens
        whether or not the caller goes on waiting. Raises UnknownAdapterError.
        """
        freeing = asyncio.ensure_future(self._free(self._engine.registry.unload(name)))
        self._tasks.add(freeing)
        freeing.add_done_callback(self._tasks.discard)
        return await asyncio.shield(freeing)

    async def _free(self, unloaded: Unloaded) -> int:
        freed, adapter = await asyncio.wrap_future(unloaded.released), unloaded.adapter
        if adapter is None:
            return freed
        return freed + await self.run(lambda engine: engine.forget_adapter(adapter))

    # ---- the engine's thread

    def _run(self) -> None:
        try:
            if self._adapters:
                self._engine.prepare_for_adapters()
            self._stats = collect(self._engine)
            self._ready.set()
            while not self._stopped:
                self._turn()
            self._engine.close()
        except Exception as error:  # noqa: BLE001  (whatever it is, every request must hear of it)
            self._fail(error)
        finally:
            self._refuse_commands()
            self._ready.set()

    def _turn(self) -> None:
        """Do what was posted, end what is overdue, run one step if there is work, pass on what it gave."""
        self._do_commands()
        self._end_overdue()
        if self._engine.has_unfinished():
            outputs = self._engine.step()
            self._note_admitted()
            for output in outputs:
                self._pass_on(output.request_id, output.delta or output.error)
        self._refresh_stats()
        self._flush()

    def _do_commands(self) -> None:
        if not self._engine.has_unfinished():
            try:
                self._commands.get(timeout=self._seconds_to_deadline())()
            except queue.Empty:
                return
        while not self._commands.empty():
            self._commands.get()()

    def _seconds_to_deadline(self) -> float | None:
        deadlines = [handle.deadline for handle in self._in_flight() if handle.deadline is not None]
        return max(min(deadlines) - time.monotonic(), 0.0) if deadlines else None

    def _take_prepared(self, handles: list[RequestHandle], copies: list[PreparedRequest]) -> None:
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
                self._end(handle, error)
                continue
            for one in (handle, *(follower for follower, _ in self._followers.get(handle, ()))):
                self._send(one, Queued())

    def _note_admitted(self) -> None:
        for seq in self._engine.scheduler.running:
            handle = self._handles.get(seq.request_id)
            if handle is not None and handle.times.admitted is None:
                handle.times.admitted = time.monotonic()

    def _pass_on(self, request_id: str, event: Any) -> None:
        handle = self._handles.get(request_id)
        if handle is None:
            raise InternalError(f"a step's output for {request_id!r}, which nobody submitted")
        if isinstance(event, PolylensError):
            self._end(handle, event)
            return
        times, now = handle.times, time.monotonic()
        times.admitted = times.admitted or now
        times.first_token = times.first_token or now
        self._enqueue(self._followers.pop(handle, []))
        if event.completion is not None:
            self._forget(handle)
        self._send(handle, event)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for handle in self._in_flight():
            if handle.deadline is not None and handle.deadline <= now:
                waited = now - handle.times.submitted
                self._end(handle, DeadlineError(f"the request was not done within its deadline ({waited:.1f} s)"))

    def _end_all(self, handles: list[RequestHandle], error: PolylensError) -> None:
        for handle in handles:
            self._end(handle, error)

    def _end(self, handle: RequestHandle, error: PolylensError) -> None:
        """End a request wherever it is, freeing what it holds; nothing happens if it has ended."""
        if handle.times.ended is None:
            self._engine.abort(handle.request_id)
            self._forget(handle)
            self._send(handle, error)
            self._enqueue(self._followers.pop(handle, []))

    def _in_flight(self) -> list[RequestHandle]:
        with self._lock:
            return list(self._handles.values())

    def _forget(self, handle: RequestHandle) -> None:
        handle.times.ended = time.monotonic()
        # The engine has released it where the request got that far; releasing twice does nothing.
        handle.lease.release()
        with self._lock:
            del self._handles[handle.request_id]
            self._lock.notify_all()

    def _send(self, handle: RequestHandle, event: Event) -> None:
        self._outbox.put(handle, event)

    def _flush(self) -> None:
        """Hand the events of this turn to their loops, one call a loop."""
        for handle in self._outbox.flush():
            self._end(handle, AbortedError("the loop of the request's caller is closed"))
            self._outbox.drop(handle.loop)

    def _refresh_stats(self) -> None:
        now = time.monotonic()
        if now - self._stats_at >= STATS_INTERVAL_S or not self._engine.has_unfinished():
            self._stats, self._stats_at = collect(self._engine), now

    # ---- ending

    def _stop(self) -> None:
        self._end_all(self._in_flight(), ShuttingDownError("the engine is being stopped"))
        self._flush()
        with self._lock:
            self._stopped = True

    def _fail(self, error: Exception) -> None:
        """The engine broke: its state is not to be trusted, so nothing of it is called any more."""
        failure = EngineFailedError(f"the engine stopped working: {type(error).__name__}: {error}")
        failure.__cause__ = error
        with self._lock:
            self._failure = failure
        for handle in self._in_flight():
            self._forget(handle)
            self._send(handle, failure)
        self._flush()

    def _refuse_commands(self) -> None:
        """Let what was posted too late find out that the thread has ended."""
        with self._lock:
            self._stopped = self._closed = True
        while not self._commands.empty():
            self._commands.get()()

    def _fulfil(self, future: Future[T], fn: Callable[[], T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if self._closed:
                raise self._failure or ShuttingDownError("the engine has been stopped")
            future.set_result(fn())
        except Exception as error:  # noqa: BLE001  (it belongs to whoever waits for the future)
            future.set_exception(error)

    def _post(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._stopped:
                raise ShuttingDownError("the engine has been stopped")
            self._commands.put(command)

    def _post_if_alive(self, command: Callable[[], None]) -> None:
        """Post what no longer matters once the thread has ended, since every request has ended with it."""
        try:
            self._post(command)
        except (EngineFailedError, ShuttingDownError):
            return


def _internal(error: Exception) -> InternalError:
    wrapped = InternalError(f"preparing the request failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _nothing() -> None:
    """Wakes the engine's thread."""
