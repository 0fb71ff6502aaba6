"""What other threads want done on the engine's thread, between two of its steps."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from polylens.errors import EngineFailedError, ShuttingDownError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Mailbox:
    """Commands in the order they were posted. Any thread may post; one thread does them, and closes it at its end."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed: EngineFailedError | ShuttingDownError | None = None

    def post(self, command: Callable[[], None]) -> None:
        """Have `command` done. Raises the reason if the mailbox is closed."""
        with self._lock:
            if self._closed is not None:
                raise self._closed
            self._commands.put(command)

    def post_if_open(self, command: Callable[[], None]) -> None:
        """Post what no longer matters once the thread has ended, since every request has ended with it."""
        try:
            self.post(command)
        except (EngineFailedError, ShuttingDownError):
            return

    def call(self, fn: Callable[[], T]) -> Future[T]:
        """Have `fn` done; the future has its result or error. Raises as `post` does."""
        future: Future[T] = Future()
        self.post(lambda: self._fulfil(future, fn))
        return future

    def do(self, wait_s: float | None = 0.0) -> None:
        """Do all that was posted, waiting for the first so long (None: without end)."""
        try:
            command = self._commands.get(timeout=wait_s)
        except queue.Empty:
            return
        command()
        while not self._commands.empty():
            self._commands.get()()

    def close(self, reason: EngineFailedError | ShuttingDownError) -> None:
        """Refuse what is posted from now on, and let what was posted too late find out."""
        with self._lock:
            self._closed = reason
        self.do()

    def _fulfil(self, future: Future[T], fn: Callable[[], T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if self._closed is not None:
                raise self._closed
            future.set_result(fn())
        except Exception as error:  # noqa: BLE001  (it belongs to whoever waits for the future)
            future.set_exception(error)
