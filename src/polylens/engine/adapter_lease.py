"""What an adapter store hands out: leases, what becomes of an unloaded adapter, overviews and counts."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from polylens.errors import InternalError

if TYPE_CHECKING:
    from polylens.adapters.load import LoadReport
    from polylens.core import Adapter
    from polylens.engine.adapter_store import AdapterStore
    from polylens.engine.adapter_tiers import Entry


class StoreLease:
    """Keeps one adapter (or, with no name, the base model) for a request until it is released.

    Releasing twice does nothing. A context manager.
    """

    def __init__(self, store: AdapterStore, entry: Entry | None) -> None:
        self._store = store
        self.entry = entry
        """None for the base model, and after the release."""
        self._is_base = entry is None

    @property
    def adapter(self) -> Adapter | None:
        """The adapter, once `read` has returned; None for the base model."""
        if self._is_base:
            return None
        if self.entry is None or self.entry.adapter is None:
            raise InternalError("a lease's adapter was asked for before it was read, or after its release")
        return self.entry.adapter

    def read(self) -> StoreLease:
        """Read the adapter's files unless they were read before: blocks. Raises AdapterError."""
        if self.entry is not None:
            self._store.read_once(self.entry)
        return self

    def release(self) -> None:
        """Say that the request no longer needs the adapter."""
        self._store.end_lease(self)

    def __enter__(self) -> StoreLease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


@dataclass(frozen=True)
class Unloaded:
    """An adapter whose name was given up. `released`: its freed bytes, once the last request with it has ended."""

    adapter: Adapter | None
    released: Future[int]


class Overview(NamedTuple):
    """One name: where its adapter comes from, what loading reported (None: not read yet), if it is on the device."""

    name: str
    source: str
    report: LoadReport | None
    on_device: bool


@dataclass(frozen=True)
class StoreStats:
    """Counts from the store's start, and bytes now (CPU memory that is the device's counts there)."""

    num_registered: int = 0
    num_on_device: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    num_reads: int = 0
    num_moves_in: int = 0
    num_moves_out: int = 0
    moves_in_s: float = 0.0
