"""The engine in a thread of its own, for callers on asyncio loops.

Three kinds of threads: the engine's, which alone touches the engine's state and runs its steps; workers, which
prepare requests (render, tokenise, decode pictures) and read adapter files; and the callers' loops, which only
hand requests in and take answers out. Whatever must happen between two steps is posted to the engine's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from polylens.config import MAX_QUEUE
from polylens.engine.copies import request_copies
from polylens.engine.handle import RequestHandle, RequestTimes
from polylens.engine.in_flight import InFlight
from polylens.engine.mailbox import Mailbox
from polylens.engine.stats import EngineStats, collect
from polylens.errors import (
    EngineFailedError,
    InternalError,
    PolylensError,
    QueueFullError,
    RequestError,
    ShuttingDownError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from polylens.adapters.load import LoadReport
    from polylens.core import Request
    from polylens.engine.adapter_lease import Unloaded
    from polylens.engine.adapter_store import AdapterStore
    from polylens.engine.engine import Engine
    from polylens.models.loading import LoadedModel

T = TypeVar("T")

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
        max_queue: int = MAX_QUEUE,
        num_workers: int = DEFAULT_WORKERS,
        adapters: bool = True,
    ) -> None:
        self._engine = engine
        self._adapters = adapters
        self._max_in_flight = engine.max_running + max_queue
        self._ids = itertools.count()
        self._workers = ThreadPoolExecutor(num_workers, "polylens-prepare")
        self._loaders = ThreadPoolExecutor(1, "polylens-adapters")
        self._mailbox = Mailbox()
        self._thread = threading.Thread(target=self._run, name="polylens-engine", daemon=True)
        self._ready = threading.Event()
        self._stopped = False
        self._stats = EngineStats()
        self._stats_at = 0.0
        self._tasks: set[asyncio.Task[int]] = set()
        """Unloads under way: a loop keeps only weak references to its tasks."""
        # The lock guards what follows, and is never held while anything slow happens.
        self._lock = threading.Condition()
        self._requests = InFlight(engine, self._lock)
        self._draining = False
        self._hurried = False
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
        return len(self._requests)

    def wait_idle(self, limit_s: float) -> bool:
        """Wait until no request is in flight (or the thread has failed), for so long at most; whether it is so."""
        with self._lock:
            return self._lock.wait_for(self._is_idle, timeout=limit_s)

    def _is_idle(self) -> bool:
        return not self._requests or self._failure is not None

    def stop(self, limit_s: float = 0.0) -> None:
        """Refuse new requests, let the others end for up to `limit_s` seconds, end the rest, stop the thread.

        Blocks; may be called several times. The rest end with ShuttingDownError.
        """
        with self._lock:
            self._draining = True
            self._lock.wait_for(lambda: self._hurried or self._is_idle(), timeout=limit_s)
        if self._thread.ident is not None:
            self._mailbox.post_if_open(self._stop)
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
        now = time.monotonic()
        deadline = None if deadline_s is None else now + deadline_s
        with self._lock:
            self._check_accepts(requests)
            # All copies answer for one adapter, whatever is loaded under its name meanwhile.
            leases = [self._engine.registry.lease(request.adapter) for _ in requests]
            handles = [
                RequestHandle(self._id_of(one), one, lease, RequestTimes(now), deadline, self._ask_abort)
                for one, lease in zip(requests, leases, strict=True)
            ]
            self._requests.add(handles)
        self._workers.submit(self._prepare, handles, allow_paths)
        if deadline is not None:
            # The thread may be asleep, to be woken no later than the deadlines it knows.
            self._mailbox.post_if_open(_nothing)
        return handles

    def _id_of(self, request: Request) -> str:
        return request.request_id or f"request-{next(self._ids)}"

    def _check_accepts(self, requests: Sequence[Request]) -> None:
        if self._failure is not None:
            raise self._failure
        if self._draining or not self._ready.is_set():
            raise ShuttingDownError("the engine is not taking requests: it is starting or being stopped")
        if len(self._requests) + len(requests) > self._max_in_flight:
            raise QueueFullError(f"{len(self._requests)} requests are running or waiting already; try again later")
        for request in requests:
            if request.request_id in self._requests:
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
            self._mailbox.post_if_open(lambda: self._requests.end_all(handles, failure))
            return
        copies = [prepared.copy(handle.request) for handle in handles]
        self._mailbox.post_if_open(lambda: self._requests.queue(handles, copies))

    def _ask_abort(self, handle: RequestHandle) -> None:
        if handle.times.ended is None:
            self._mailbox.post_if_open(lambda: self._requests.abort(handle))

    # ---- between steps

    def call(self, fn: Callable[[], T]) -> Future[T]:
        """Run `fn` on the engine's thread between two steps; the future has its result or error.

        Raises EngineFailedError or ShuttingDownError when there is no thread to run it.
        """
        return self._mailbox.call(fn)

    async def run(self, fn: Callable[[Engine], T]) -> T:
        """`call` for loops: `fn` gets the engine, and must be short, as all requests wait for it."""
        return await asyncio.wrap_future(self.call(lambda: fn(self._engine)))

    async def check_integrity(self) -> None:
        """Raise InternalError unless the engine's pages, caches and requests agree."""
        await self.run(lambda engine: engine.check_integrity())
        await self.run(lambda _: self._requests.check_integrity())

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
            self._mailbox.close(self._failure or ShuttingDownError("the engine has been stopped"))
            self._ready.set()

    def _turn(self) -> None:
        """Do what was posted, end what is overdue, run one step if there is work, pass on what it gave."""
        self._mailbox.do(0.0 if self._engine.has_unfinished() else self._requests.seconds_to_deadline())
        self._requests.end_overdue()
        if self._engine.has_unfinished():
            self._requests.take_outputs(self._engine.step())
        self._refresh_stats()
        self._requests.flush()

    def _refresh_stats(self) -> None:
        now = time.monotonic()
        if now - self._stats_at >= STATS_INTERVAL_S or not self._engine.has_unfinished():
            self._stats, self._stats_at = collect(self._engine), now

    def _stop(self) -> None:
        self._requests.end_all(self._requests.all(), ShuttingDownError("the engine is being stopped"))
        self._requests.flush()
        self._stopped = True

    def _fail(self, error: Exception) -> None:
        failure = EngineFailedError(f"the engine stopped working: {type(error).__name__}: {error}")
        failure.__cause__ = error
        with self._lock:
            self._failure = failure
        self._requests.fail(failure)
        self._requests.flush()


def _internal(error: Exception) -> InternalError:
    wrapped = InternalError(f"preparing the request failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _nothing() -> None:
    """Wakes the engine's thread."""
