"""Adapters by name in three tiers: on the device within a budget, in CPU memory within another, and on disk.

Thousands may be registered; files are read when a name is first asked for. A request leases its adapter from the
moment it is submitted, which keeps its content alive under whatever happens to the name. Only when the scheduler
admits the request must the tensors be on the device: the store is the scheduler's gate. It brings them in on a thread
of its own while steps go on, and puts others out: the one used longest ago among those that no step uses, never a
pinned one.

Where all that is on the device is in use, an adapter that waits makes a claim (see `Residents`): so a stream of
requests for a resident adapter keeps no other out, and the patience bounds how often adapters change places.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from polylens.adapters.load import check_adapter_name
from polylens.engine.adapter_lease import StoreLease, StoreStats, Unloaded
from polylens.engine.adapter_residents import Residents
from polylens.engine.adapter_tiers import Entry
from polylens.errors import AdapterConflictError, AdapterError, InternalError, UnknownAdapterError

if TYPE_CHECKING:
    from polylens.adapters.load import AdapterPath, LoadReport
    from polylens.core import Adapter
    from polylens.engine.adapter_tiers import Place, Read
    from polylens.engine.sequence import Sequence

PATIENCE_S = 0.5
"""Time that an adapter without room waits before others must make room: many times what bringing one in takes."""


class AdapterStore:
    """See the module's text. Safe to use from several threads; files and copies never hold its lock.

    read, place: how an adapter gets from disk to CPU memory, and from there to the device. device_bytes, host_bytes:
    budgets; None: no limit. shared_memory: the device is the CPU, so placed tensors need no second copy.
    """

    def __init__(
        self,
        read: Read,
        place: Place,
        *,
        device_bytes: int | None = None,
        host_bytes: int | None = None,
        shared_memory: bool = False,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._place = place
        self._shared_memory = shared_memory
        self._clock = clock
        self._mover = ThreadPoolExecutor(1, "polylens-adapter-tiers")
        self._loading = threading.Lock()
        """One `load` at a time: what a name means must not change between its parts."""
        self._reading = threading.Lock()
        """One first read at a time; the others find what it read."""
        self._lock = threading.Condition()
        self._entries: dict[str, Entry] = {}
        self._retired: dict[Entry, Future[int]] = {}
        self._by_adapter: dict[Adapter, Entry] = {}
        self._held = Residents(device_bytes, host_bytes, patience_s, clock)
        self._failed: list[Entry] = []
        self._ticks = itertools.count(1)
        self._num_reads = self._num_moves_in = self._num_moves_out = 0
        self._moves_in_s = 0.0

    # ---- names

    def load(
        self, name: str, path: AdapterPath, *, replace: bool = False, pinned: bool = False, prefetch: bool = False
    ) -> LoadReport:
        """Read the adapter at `path` and have it under `name`; blocks.

        The same content under the same name changes nothing but `pinned` (the report says `changed=False`). Other
        content raises AdapterConflictError unless `replace`; it then counts for leases taken from now on. pinned:
        it never leaves the device. prefetch: it is on the device when this returns, as it is where there is room
        anyway. Raises AdapterError, and then what was there before stays as it was.
        """
        with self._loading:
            return self._load(name, path, replace, pinned, prefetch)

    def _load(self, name: str, path: AdapterPath, replace: bool, pinned: bool, prefetch: bool) -> LoadReport:
        check_adapter_name(name)
        entry = Entry(name, path, pinned=pinned)
        entry.take_in(*self._read_files(name, path))
        self._check_fits(entry)
        with self._lock:
            old = self._entries.get(name)
            same = old is not None and old.adapter is not None and old.adapter.content == entry.adapter.content  # type: ignore[union-attr]
            if old is not None and not same and not replace and (old.adapter is not None or old.path != path):
                raise AdapterConflictError(
                    f"adapter {name!r} is loaded with other content (from {str(old.path)!r}); "
                    "unload it first, or load it with replace=True (over HTTP: load_inplace)"
                )
            wanted = old if same and old is not None else entry
        # Brought in before the name changes its meaning: where there is no room for it, nothing has changed.
        if pinned or prefetch or self._has_room(wanted):
            try:
                self._bring_in_now(wanted)
            except AdapterError:
                self._give_up(entry)
                raise
        with self._lock:
            if wanted is entry:
                if old is not None:
                    self._retire(old)
                self._install(entry)
            wanted.pinned = pinned
            self._trim_host(wanted)
        report = wanted.report
        assert report is not None
        return report.unchanged() if same else report

    def register(self, name: str, path: AdapterPath, *, pinned: bool = False) -> None:
        """Have the adapter at `path` under `name` without reading it. AdapterConflictError if the name is taken."""
        check_adapter_name(name)
        with self._lock:
            if name in self._entries and self._entries[name].path != path:
                raise AdapterConflictError(f"adapter {name!r} is registered with another path; unload it first")
            self._entries.setdefault(name, Entry(name, path, pinned=pinned))

    def prefetch(self, name: str) -> None:
        """Have `name` on the device when this returns; blocks. Raises UnknownAdapterError, AdapterError."""
        with self.lease(name) as lease:
            entry = lease.read()._entry
            assert entry is not None
            self._bring_in_now(entry)

    def unload(self, name: str) -> Unloaded:
        """Forget `name`. Requests that hold it finish with it. Raises UnknownAdapterError."""
        with self._lock:
            entry = self._entry(name)
            del self._entries[name]
            return Unloaded(entry.adapter, self._retire(entry))

    def names(self) -> tuple[str, ...]:
        """The names that requests may use, in the order of loading."""
        with self._lock:
            return tuple(self._entries)

    def path(self, name: str) -> AdapterPath:
        """What `name` was loaded or registered from. Raises UnknownAdapterError."""
        with self._lock:
            return self._entry(name).path

    def get(self, name: str) -> Adapter:
        """The adapter `name` now means, read if it was only registered. Raises UnknownAdapterError, AdapterError."""
        with self.lease(name) as lease:
            adapter = lease.read().adapter
        assert adapter is not None
        return adapter

    def report(self, name: str) -> LoadReport:
        """What loading `name` reported. Raises UnknownAdapterError, AdapterError."""
        with self._lock:
            entry = self._entry(name)
        self._read_once(entry)
        assert entry.report is not None
        return entry.report

    def overview(self) -> list[tuple[str, str, LoadReport | None, bool]]:
        """Of every name: where it comes from, what loading reported (None: not read yet), if it is on the device."""
        with self._lock:
            return [(entry.name, str(entry.path), entry.report, entry.on_device) for entry in self._entries.values()]

    def lease(self, name: str | None) -> StoreLease:
        """Hold what `name` now means; None holds the base model. Raises UnknownAdapterError. Never blocks."""
        if name is None:
            return StoreLease(self, None)
        with self._lock:
            entry = self._entry(name)
            entry.num_leases += 1
            return StoreLease(self, entry)

    def digests_in_use(self) -> tuple[set[str], set[str]]:
        """Vision and language digests of all adapters that requests use or may use."""
        with self._lock:
            adapters = list(self._by_adapter)
        return {one.vision_digest for one in adapters}, {one.language_digest for one in adapters}

    def resident_bytes(self) -> int:
        """Bytes of all adapters in memory: those with a name, and those only leases keep."""
        with self._lock:
            return self._held.device_bytes + self._held.host_bytes

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                num_registered=len(self._entries),
                num_on_device=sum(entry.on_device for entry in self._held),
                device_bytes=self._held.device_bytes,
                host_bytes=self._held.host_bytes,
                num_reads=self._num_reads,
                num_moves_in=self._num_moves_in,
                num_moves_out=self._num_moves_out,
                moves_in_s=self._moves_in_s,
            )

    def close(self) -> None:
        """Wait for what is being brought in; nothing is brought in afterwards."""
        self._mover.shutdown(wait=True, cancel_futures=True)

    # ---- the scheduler's gate (engine thread)

    def enter(self, seq: Sequence) -> bool:
        """Keep the adapter of `seq` on the device until `leave`; False: it is not there, and has been asked for."""
        if seq.adapter is None:
            return True
        with self._lock:
            entry = self._by_adapter[seq.adapter]
            if not entry.on_device:
                self._ask_for(entry)
                return False
            if entry in self._held.leaving():
                return False
            entry.num_users += 1
            entry.fresh = False
            entry.last_used = next(self._ticks)
            return True

    def leave(self, seq: Sequence) -> None:
        """A step no longer uses the adapter for `seq`."""
        if seq.adapter is None:
            return
        with self._lock:
            entry = self._by_adapter[seq.adapter]
            entry.num_users -= 1
            entry.last_used = next(self._ticks)

    def take_failures(self) -> dict[Adapter, AdapterError]:
        """Adapters that could not be brought in since the last call: their waiting requests must end."""
        with self._lock:
            errors = {}
            for entry in self._failed:
                errors[_adapter(entry)] = _as_adapter_error(entry)
                entry.error = None
            self._failed.clear()
            return errors

    def wait(self, timeout_s: float) -> None:
        """Wait until an adapter has come in, or for so long."""
        with self._lock:
            self._lock.wait(timeout_s)

    def check_integrity(self) -> None:
        """Raise InternalError unless users hold leases and are on the device, within the budget."""
        with self._lock:
            self._held.check_integrity((*self._by_adapter.values(), *self._retired))

    # ---- moving (lock held, but where it says otherwise)

    def _ask_for(self, entry: Entry) -> None:
        """Begin to bring an adapter in, or claim room for it."""
        if entry.coming or entry.error is not None:
            return
        if self._make_room(entry):
            self._set_aside(entry)
            self._mover.submit(self._bring_in, entry)
        else:
            self._held.claim(entry)

    def _make_room(self, entry: Entry) -> bool:
        """Put idle adapters out until `entry` fits; False, and nothing done, if they are not enough."""
        leaving = self._held.replaceable_by(entry)
        for one in leaving or ():
            self._put_out(one)
        return leaving is not None

    def _set_aside(self, entry: Entry) -> None:
        entry.coming = True
        self._held.note(entry)
        self._by_adapter[_adapter(entry)] = entry
        self._held.meet(entry)

    def _put_out(self, entry: Entry) -> None:
        if entry.on_device:
            entry.deltas.placed = None
            self._num_moves_out += 1
            self._held.note(entry)

    def _bring_in(self, entry: Entry) -> None:
        """Without the lock: copy an adapter, whose room is set aside, to the device. Errors wait in the entry."""
        began = self._clock()
        try:
            host = entry.host
            if host is None:
                adapter, report = self._read_files(entry.name, entry.path)
                with self._lock:
                    entry.take_in(adapter, report)
                host = adapter.deltas
            placed = self._place(host)
        except Exception as error:  # noqa: BLE001  (it must reach the requests that wait for the adapter)
            with self._lock:
                entry.coming, entry.error = False, error
                self._failed.append(entry)
                self._held.note(entry)
                self._drop_if_released(entry)
                self._lock.notify_all()
            return
        with self._lock:
            entry.deltas.placed = placed
            entry.coming, entry.fresh, entry.came_at = False, True, next(self._ticks)
            self._num_moves_in += 1
            self._moves_in_s += self._clock() - began
            if self._shared_memory:
                entry.host = None
            self._held.note(entry)
            self._trim_host(entry)
            self._drop_if_released(entry)
            self._lock.notify_all()

    def _bring_in_now(self, entry: Entry) -> None:
        """Without the lock: as `_bring_in`, on this thread. Raises AdapterError; also where there is no room."""
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
                self._by_adapter.pop(_adapter(entry), None)
                raise error

    def _give_up(self, entry: Entry) -> None:
        """Without the lock: forget an entry that has not got its name."""
        with self._lock:
            entry.host = None
            self._held.note(entry)

    def _trim_host(self, newest: Entry) -> None:
        """Forget copies in CPU memory, the longest unused first, until they fit; the files are still there."""
        if self._held.host_budget is None:
            return
        newest.last_used = next(self._ticks)
        for one in self._held.beyond_host_budget():
            one.host = None
            self._held.note(one)

    # ---- reading (without the lock)

    def _read_files(self, name: str, path: AdapterPath) -> tuple[Adapter, LoadReport]:
        found = self._read(name, path)
        with self._lock:
            self._num_reads += 1
        return found

    def _read_once(self, entry: Entry) -> None:
        with self._reading:
            if entry.adapter is not None:
                return
            adapter, report = self._read_files(entry.name, entry.path)
            with self._lock:
                entry.take_in(adapter, report)
            try:
                self._check_fits(entry)
            except AdapterError:
                entry.adapter = entry.report = entry.host = None
                raise
        with self._lock:
            self._install_read(entry)
            self._trim_host(entry)

    def _check_fits(self, entry: Entry) -> None:
        budget = self._held.device_budget
        if budget is not None and entry.num_bytes > budget:
            raise AdapterError(
                f"adapter {entry.name!r} needs {entry.num_bytes} bytes on the device; the budget for adapters is "
                f"{budget}"
            )

    def _has_room(self, entry: Entry) -> bool:
        with self._lock:
            return self._held.missing_bytes(entry) == 0

    # ---- entries (lock held)

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise UnknownAdapterError(name, tuple(self._entries))
        return self._entries[name]

    def _install(self, entry: Entry) -> None:
        self._entries[entry.name] = entry
        self._install_read(entry)

    def _install_read(self, entry: Entry) -> None:
        self._by_adapter[_adapter(entry)] = entry
        self._held.note(entry)

    def _retire(self, entry: Entry) -> Future[int]:
        released: Future[int] = Future()
        released.set_running_or_notify_cancel()  # whoever gives up waiting must not cancel it
        self._retired[entry] = released
        self._drop_if_released(entry)
        return released

    def _release(self, lease: StoreLease) -> None:
        with self._lock:
            entry, lease._entry = lease._entry, None
            if entry is not None:
                entry.num_leases -= 1
                self._drop_if_released(entry)

    def _drop_if_released(self, entry: Entry) -> None:
        if entry.num_leases or entry.coming or entry not in self._retired:
            return
        released = self._retired.pop(entry)
        freed = entry.num_bytes * ((entry.host is not None) + entry.on_device)
        self._put_out(entry)
        entry.host = None
        self._held.note(entry)
        if entry.adapter is not None:
            self._by_adapter.pop(entry.adapter, None)
        released.set_result(freed)


def _adapter(entry: Entry) -> Adapter:
    if entry.adapter is None:
        raise InternalError(f"adapter {entry.name!r} has not been read")
    return entry.adapter


def _as_adapter_error(entry: Entry) -> AdapterError:
    if isinstance(entry.error, AdapterError):
        return entry.error
    error = AdapterError(f"adapter {entry.name!r} could not be brought in: {entry.error}")
    error.__cause__ = entry.error
    return error
