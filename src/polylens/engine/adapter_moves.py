"""How adapters' tensors get from disk to CPU memory and the device, and leave them again; see `AdapterStore`."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from polylens.errors import AdapterError, InternalError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from polylens.adapters.load import LoadReport
    from polylens.core import Adapter
    from polylens.engine.adapter_residents import Residents
    from polylens.engine.adapter_tiers import Entry, Place, Read


class AdapterMoves:
    """Moves the store's entries. Methods are called with the store's lock held, but where they say otherwise.

    read, place: from disk to CPU memory, and from there to the device. shared_memory: the device is the CPU, so placed
    tensors need no second copy. arrived: told of every entry that is no longer on its way, lock held.
    """

    def __init__(
        self,
        read: Read,
        place: Place,
        held: Residents,
        lock: threading.Condition,
        *,
        shared_memory: bool,
        arrived: Callable[[Entry], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._place = place
        self._held = held
        self._lock = lock
        self._shared_memory = shared_memory
        self._arrived = arrived
        self._clock = clock
        self._mover = ThreadPoolExecutor(1, "polylens-adapter-tiers")
        self._failed: list[Entry] = []
        self.num_reads = self.num_in = self.num_out = 0
        self.in_s = 0.0
        """Seconds that bringing adapters in took, together."""

    def read(self, entry: Entry) -> tuple[Adapter, LoadReport]:
        """Without the lock: read an entry's files. Raises AdapterError."""
        found = self._read(entry.name, entry.path)
        with self._lock:
            self.num_reads += 1
        return found

    def check_fits(self, entry: Entry) -> None:
        """Raise AdapterError if the device could not take `entry` even alone."""
        budget = self._held.device_budget
        if budget is not None and entry.num_bytes > budget:
            raise AdapterError(
                f"adapter {entry.name!r} needs {entry.num_bytes} bytes on the device; the budget for adapters is "
                f"{budget}"
            )

    # ---- in

    def ask_for(self, entry: Entry) -> None:
        """Begin to bring an adapter in, or claim room for it."""
        if entry.coming or entry.error is not None:
            return
        if self._make_room(entry):
            self._set_aside(entry)
            self._mover.submit(self._bring_in, entry)
        else:
            self._held.claim(entry)

    def bring_in_now(self, entry: Entry) -> None:
        """Without the lock: have an adapter on the device on return. Raises AdapterError, also without room for it."""
        with self._lock:
            self._lock.wait_for(lambda: not entry.coming)
            if entry.on_device:
                return
            if not self._make_room(entry):
                raise AdapterError(
                    f"adapter {entry.name!r} needs {entry.num_bytes} bytes on the device, and those there now are "
                    "pinned or in use; unload one, or load it without pinned and prefetch"
                )
            self._set_aside(entry)
        self._bring_in(entry)
        with self._lock:
            # Nobody may be waiting for it: then it is as idle as any other.
            entry.fresh = False
            if entry.error is not None:
                error, entry.error = _as_adapter_error(entry), None
                self._failed.remove(entry)
                raise error

    def _make_room(self, entry: Entry) -> bool:
        """Put idle adapters out until `entry` fits; False, and nothing done, if they are not enough."""
        leaving = self._held.replaceable_by(entry)
        for one in leaving or ():
            self._put_out(one)
        return leaving is not None

    def _set_aside(self, entry: Entry) -> None:
        entry.coming = True
        self._held.note(entry)
        self._held.meet(entry)

    def _bring_in(self, entry: Entry) -> None:
        """Without the lock: copy an adapter, whose room is set aside, to the device. Errors wait in the entry."""
        began = self._clock()
        try:
            host = entry.host
            if host is None:
                adapter, report = self.read(entry)
                with self._lock:
                    entry.take_in(adapter, report)
                host = adapter.deltas
            placed = self._place(host)
        except Exception as error:  # noqa: BLE001  (it must reach the requests that wait for the adapter)
            with self._lock:
                entry.error = error
                self._failed.append(entry)
                self._end_coming(entry)
            return
        with self._lock:
            entry.deltas.placed = placed
            entry.fresh, entry.came_at = True, self._held.tick()
            self.num_in += 1
            self.in_s += self._clock() - began
            if self._shared_memory:
                entry.host = None
            self.trim_host(entry)
            self._end_coming(entry)

    def _end_coming(self, entry: Entry) -> None:
        entry.coming = False
        self._held.note(entry)
        self._arrived(entry)
        self._lock.notify_all()

    def take_failures(self) -> dict[Adapter, AdapterError]:
        """Adapters that could not be brought in since the last call."""
        errors = {}
        for entry in self._failed:
            if entry.adapter is None:
                raise InternalError(f"adapter {entry.name!r} was to be brought in before it was read")
            errors[entry.adapter] = _as_adapter_error(entry)
            entry.error = None
        self._failed.clear()
        return errors

    # ---- out

    def _put_out(self, entry: Entry) -> None:
        if entry.on_device:
            entry.deltas.placed = None
            self.num_out += 1
            self._held.note(entry)

    def forget(self, entry: Entry) -> int:
        """Free all that an entry holds. Returns the bytes."""
        freed = entry.num_bytes * ((entry.host is not None) + entry.on_device)
        self._put_out(entry)
        entry.host = None
        self._held.note(entry)
        return freed

    def trim_host(self, newest: Entry) -> None:
        """Forget copies in CPU memory, the longest unused first, until they fit; the files are still there."""
        if self._held.host_budget is None:
            return
        newest.last_used = self._held.tick()
        for one in self._held.beyond_host_budget():
            one.host = None
            self._held.note(one)

    def close(self) -> None:
        """Without the lock: wait for what is being brought in; nothing is brought in afterwards."""
        self._mover.shutdown(wait=True, cancel_futures=True)


def _as_adapter_error(entry: Entry) -> AdapterError:
    if isinstance(entry.error, AdapterError):
        return entry.error
    error = AdapterError(f"adapter {entry.name!r} could not be brought in: {entry.error}")
    error.__cause__ = entry.error
    return error
