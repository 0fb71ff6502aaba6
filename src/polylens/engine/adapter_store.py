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

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from polylens.adapters.load import check_adapter_name
from polylens.engine.adapter_lease import Overview, StoreLease, StoreStats, Unloaded
from polylens.engine.adapter_moves import AdapterMoves
from polylens.engine.adapter_residents import Residents
from polylens.engine.adapter_tiers import Entry
from polylens.errors import AdapterConflictError, AdapterError, UnknownAdapterError

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
        self._loading = threading.Lock()
        """One `load` at a time: what a name means must not change between its parts."""
        self._reading = threading.Lock()
        """One first read at a time; the others find what it read."""
        self._lock = threading.Condition()
        self._entries: dict[str, Entry] = {}
        self._retired: dict[Entry, Future[int]] = {}
        self._by_adapter: dict[Adapter, Entry] = {}
        self._held = Residents(device_bytes, host_bytes, patience_s, clock)
        self._moves = AdapterMoves(
            read,
            place,
            self._held,
            self._lock,
            shared_memory=shared_memory,
            arrived=self._drop_if_released,
            clock=clock,
        )

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
        entry.take_in(*self._moves.read(entry))
        self._moves.check_fits(entry)
        old = self._replaced_by(entry, replace)
        same = old is not None and old.has_content_of(entry)
        wanted = old if same and old is not None else entry
        # Brought in before the name changes its meaning: where there is no room for it, nothing has changed.
        if pinned or prefetch or self._has_room(wanted):
            try:
                self._moves.bring_in_now(wanted)
            except AdapterError:
                with self._lock:
                    self._moves.forget(entry)
                raise
        with self._lock:
            if wanted is entry:
                if old is not None:
                    self._retire(old)
                self._entries[name] = entry
                self._install(entry)
            wanted.pinned = pinned
            self._moves.trim_host(wanted)
        report = wanted.report
        assert report is not None
        return report.unchanged() if same else report

    def _replaced_by(self, entry: Entry, replace: bool) -> Entry | None:
        """What the entry's name means now. Raises AdapterConflictError if that has other content and must stay."""
        with self._lock:
            old = self._entries.get(entry.name)
            if old is None or replace or old.has_content_of(entry) or (old.adapter is None and old.path == entry.path):
                return old
        raise AdapterConflictError(
            f"adapter {entry.name!r} is loaded with other content (from {str(old.path)!r}); "
            "unload it first, or load it with replace=True (over HTTP: load_inplace)"
        )

    def _has_room(self, entry: Entry) -> bool:
        with self._lock:
            return self._held.missing_bytes(entry) == 0

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
            entry = lease.read().entry
            assert entry is not None
            self._moves.bring_in_now(entry)

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
        self.read_once(entry)
        assert entry.report is not None
        return entry.report

    def overview(self) -> list[Overview]:
        """What every name is, in the order of loading."""
        with self._lock:
            entries = self._entries.values()
            return [Overview(entry.name, str(entry.path), entry.report, entry.on_device) for entry in entries]

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
                num_reads=self._moves.num_reads,
                num_moves_in=self._moves.num_in,
                num_moves_out=self._moves.num_out,
                moves_in_s=self._moves.in_s,
            )

    def close(self) -> None:
        """Wait for what is being brought in; nothing is brought in afterwards."""
        self._moves.close()

    # ---- the scheduler's gate (engine thread)

    def enter(self, seq: Sequence) -> bool:
        """Keep the adapter of `seq` on the device until `leave`; False: it is not there, and has been asked for."""
        if seq.adapter is None:
            return True
        with self._lock:
            entry = self._by_adapter[seq.adapter]
            if not entry.on_device:
                self._moves.ask_for(entry)
                return False
            if entry in self._held.leaving():
                return False
            entry.num_users += 1
            entry.fresh = False
            entry.last_used = self._held.tick()
            return True

    def leave(self, seq: Sequence) -> None:
        """A step no longer uses the adapter for `seq`."""
        if seq.adapter is None:
            return
        with self._lock:
            entry = self._by_adapter[seq.adapter]
            entry.num_users -= 1
            entry.last_used = self._held.tick()

    def take_failures(self) -> dict[Adapter, AdapterError]:
        """Adapters that could not be brought in since the last call: their waiting requests must end."""
        with self._lock:
            return self._moves.take_failures()

    def wait(self, timeout_s: float) -> None:
        """Wait until an adapter has come in, or for so long."""
        with self._lock:
            self._lock.wait(timeout_s)

    def check_integrity(self) -> None:
        """Raise InternalError unless users hold leases and are on the device, within the budget."""
        with self._lock:
            self._held.check_integrity((*self._by_adapter.values(), *self._retired))

    # ---- what leases ask

    def read_once(self, entry: Entry) -> None:
        """Read an entry's files unless they were read before: blocks. Raises AdapterError."""
        with self._reading:
            if entry.adapter is not None:
                return
            adapter, report = self._moves.read(entry)
            with self._lock:
                entry.take_in(adapter, report)
            try:
                self._moves.check_fits(entry)
            except AdapterError:
                entry.adapter = entry.report = entry.host = None
                raise
            with self._lock:
                self._install(entry)
                self._moves.trim_host(entry)

    def end_lease(self, lease: StoreLease) -> None:
        """Once only: later calls do nothing."""
        with self._lock:
            entry, lease.entry = lease.entry, None
            if entry is not None:
                entry.num_leases -= 1
                self._drop_if_released(entry)

    # ---- entries (lock held)

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise UnknownAdapterError(name, tuple(self._entries))
        return self._entries[name]

    def _install(self, entry: Entry) -> None:
        assert entry.adapter is not None
        self._by_adapter[entry.adapter] = entry
        self._held.note(entry)

    def _retire(self, entry: Entry) -> Future[int]:
        released: Future[int] = Future()
        released.set_running_or_notify_cancel()  # whoever gives up waiting must not cancel it
        self._retired[entry] = released
        self._drop_if_released(entry)
        return released

    def _drop_if_released(self, entry: Entry) -> None:
        if entry.num_leases or entry.coming or entry not in self._retired:
            return
        released = self._retired.pop(entry)
        if entry.adapter is not None:
            self._by_adapter.pop(entry.adapter, None)
        released.set_result(self._moves.forget(entry))
