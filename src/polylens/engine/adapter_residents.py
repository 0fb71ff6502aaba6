"""Which adapters hold memory, how much of it, and who has to leave for whom. Guarded by the store's lock.

Where all that is on the device is in use, an adapter that waits makes a claim. A claim older than `patience_s` names
those that must leave: just as many as make its room, those that came first.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from polylens.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from polylens.engine.adapter_tiers import Entry


class Residents:
    """The entries that hold memory somewhere: few, where thousands are registered.

    device_bytes, host_bytes: budgets; None: no limit. clock: in seconds.
    """

    def __init__(
        self, device_bytes: int | None, host_bytes: int | None, patience_s: float, clock: Callable[[], float]
    ) -> None:
        self.device_budget = device_bytes
        self.host_budget = host_bytes
        self._patience_s = patience_s
        self._clock = clock
        self._entries: dict[Entry, None] = {}
        self._claim: tuple[Entry, float] | None = None
        self._ticks = itertools.count(1)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, entry: Entry) -> None:
        """To be called after every change of what `entry` holds."""
        if entry.holds_memory:
            self._entries[entry] = None
        else:
            self._entries.pop(entry, None)

    def tick(self) -> int:
        """A point in the order in which entries came and were used."""
        return next(self._ticks)

    # ---- how much

    @property
    def device_bytes(self) -> int:
        """Bytes on the device, those set aside for entries that are coming among them."""
        return sum(entry.num_bytes for entry in self._entries if entry.on_device or entry.coming)

    @property
    def host_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self._entries if entry.host is not None)

    def missing_bytes(self, entry: Entry) -> int:
        """What the device lacks to take `entry` in."""
        if self.device_budget is None:
            return 0
        return max(0, self.device_bytes + entry.num_bytes - self.device_budget)

    # ---- who leaves

    def replaceable_by(self, entry: Entry) -> list[Entry] | None:
        """The idle ones, longest unused first, that make room for `entry` when they leave; None: too few are idle."""
        missing = self.missing_bytes(entry)
        idle = sorted((one for one in self._entries if one.is_idle), key=lambda one: one.last_used)
        chosen = _enough(idle, missing)
        return chosen if sum(one.num_bytes for one in chosen) >= missing else None

    def beyond_host_budget(self) -> list[Entry]:
        """The longest unused ones whose copies in CPU memory must go, so that the others fit."""
        if self.host_budget is None:
            return []
        copies = sorted((one for one in self._entries if one.host is not None), key=lambda one: one.last_used)
        return _enough(copies, self.host_bytes - self.host_budget)

    # ---- claims

    def claim(self, entry: Entry) -> None:
        """`entry` waits for room; one claim at a time, until it is met or nobody waits for it any more."""
        if self._claim is None or self._claim[0].num_leases == 0:
            self._claim = (entry, self._clock())

    def meet(self, entry: Entry) -> None:
        """`entry` is given its room."""
        if self._claim is not None and self._claim[0] is entry:
            self._claim = None

    def leaving(self) -> Collection[Entry]:
        """The entries that take no new sequences, as an old claim needs their room."""
        if self._claim is None:
            return ()
        claimant, since = self._claim
        if claimant.num_leases == 0 or claimant.coming or claimant.on_device:
            self._claim = None
            return ()
        if self._clock() - since < self._patience_s:
            return ()
        others = [one for one in self._entries if one.on_device and not one.pinned]
        return _enough(sorted(others, key=lambda one: one.came_at), self.missing_bytes(claimant))

    # ---- upkeep

    def check_integrity(self, others: Collection[Entry]) -> None:
        """Raise InternalError unless these are those that hold memory (`others`: all that may), within the budget."""
        for entry in {**self._entries, **dict.fromkeys(others)}:
            if (entry in self._entries) != entry.holds_memory:
                raise InternalError(f"adapter {entry.name!r}: whether it holds memory is not known")
            if not 0 <= entry.num_users <= entry.num_leases:
                raise InternalError(f"adapter {entry.name!r}: {entry.num_users} users, {entry.num_leases} leases")
            if entry.num_users and not entry.on_device:
                raise InternalError(f"adapter {entry.name!r}: used but not on the device")
        if self.device_budget is not None and self.device_bytes > self.device_budget:
            raise InternalError(f"{self.device_bytes} adapter bytes on the device of {self.device_budget}")


def _enough(entries: Collection[Entry], num_bytes: int) -> list[Entry]:
    """The first entries that together have so many bytes; all where they have fewer."""
    chosen: list[Entry] = []
    for entry in entries:
        if num_bytes <= 0:
            break
        chosen.append(entry)
        num_bytes -= entry.num_bytes
    return chosen
