"""The adapters that are loaded, by name; and leases, which keep one alive while a request uses it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polylens.adapters.load import load_adapter
from polylens.errors import AdapterConflictError, UnknownAdapterError

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import TracebackType

    import torch

    from polylens.adapters.load import AdapterPath, LoadReport, Pack
    from polylens.core import Adapter, ModelLayers


@dataclass(eq=False)
class _Entry:
    """One loaded adapter and how many leases hold it. Guarded by the registry's lock."""

    adapter: Adapter
    report: LoadReport
    num_leases: int = 0


class AdapterLease:
    """Keeps one adapter (or, with `adapter` None, the base model) for a request until it is released.

    Releasing twice does nothing. A context manager.
    """

    def __init__(self, registry: AdapterRegistry, entry: _Entry | None) -> None:
        self._registry = registry
        self._entry = entry
        self.adapter = None if entry is None else entry.adapter

    def release(self) -> None:
        """Say that the request no longer needs the adapter."""
        self._registry._release(self)

    def __enter__(self) -> AdapterLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class AdapterRegistry:
    """Loaded adapters of one model. Safe to use from several threads; reading files never holds the lock.

    An adapter that is unloaded or replaced while leases hold it stays alive, and its bytes counted, until
    the last of them is released.
    """

    def __init__(
        self,
        layers: ModelLayers,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        no_effect: Collection[str] = (),
        pack: Pack | None = None,
    ) -> None:
        """no_effect and pack: see `load_adapter`."""
        self._layers = layers
        self._dtype = dtype
        self._device = device
        self._no_effect = frozenset(no_effect)
        self._pack = pack
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._retired: set[_Entry] = set()

    def describe_model(self, layers: ModelLayers, no_effect: Collection[str]) -> None:
        """Tell what has been found out about the model's layers since; counts for loads from now on."""
        with self._lock:
            self._layers, self._no_effect = layers, frozenset(no_effect)

    def load(self, name: str, path: AdapterPath, *, replace: bool = False) -> LoadReport:
        """Load the adapter at `path` under `name`.

        The same content under the same name changes nothing (the report says `changed=False`). Other content
        raises AdapterConflictError unless `replace`; it then counts for leases taken from now on. Whatever
        is raised, what was loaded before stays as it was.
        """
        with self._lock:
            layers, no_effect = self._layers, self._no_effect
        adapter, report = load_adapter(
            path,
            layers,
            name=name,
            dtype=self._dtype,
            device=self._device,
            no_effect=no_effect,
            pack=self._pack,
        )
        with self._lock:
            old = self._entries.get(name)
            if old is not None and old.adapter.digests == adapter.digests:
                return report.unchanged()
            if old is not None and not replace:
                raise AdapterConflictError(
                    f"adapter {name!r} is loaded with other content (from {old.adapter.source!r}); "
                    "unload it first, or load with replace=True"
                )
            if old is not None:
                self._retire(old)
            self._entries[name] = _Entry(adapter, report)
        return report

    def unload(self, name: str) -> None:
        """Forget `name`. Requests that hold it finish with it. Raises UnknownAdapterError."""
        with self._lock:
            self._retire(self._entry(name))
            del self._entries[name]

    def names(self) -> tuple[str, ...]:
        """The names that requests may use, in the order of loading."""
        with self._lock:
            return tuple(self._entries)

    def get(self, name: str) -> Adapter:
        """The adapter `name` now means. Raises UnknownAdapterError."""
        with self._lock:
            return self._entry(name).adapter

    def report(self, name: str) -> LoadReport:
        """What loading `name` reported. Raises UnknownAdapterError."""
        with self._lock:
            return self._entry(name).report

    def lease(self, name: str | None) -> AdapterLease:
        """Hold the adapter `name` now means; None holds the base model. Raises UnknownAdapterError."""
        if name is None:
            return AdapterLease(self, None)
        with self._lock:
            entry = self._entry(name)
            entry.num_leases += 1
            return AdapterLease(self, entry)

    def resident_bytes(self) -> int:
        """Bytes of all adapters in memory: those with a name, and those only leases keep."""
        with self._lock:
            return sum(entry.adapter.num_bytes for entry in (*self._entries.values(), *self._retired))

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise UnknownAdapterError(name, tuple(self._entries))
        return self._entries[name]

    def _retire(self, entry: _Entry) -> None:
        if entry.num_leases > 0:
            self._retired.add(entry)

    def _release(self, lease: AdapterLease) -> None:
        with self._lock:
            entry, lease._entry = lease._entry, None
            if entry is None:
                return
            entry.num_leases -= 1
            if entry.num_leases == 0:
                self._retired.discard(entry)
