"""One adapter's tensors as they move between device, CPU memory and disk; see `AdapterStore`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from polylens.errors import AdapterFormatError, InternalError

if TYPE_CHECKING:
    from collections.abc import Callable

    from polylens.adapters.load import AdapterPath, LoadReport
    from polylens.core import Adapter, Change

    Read = Callable[[str, "AdapterPath"], tuple[Adapter, LoadReport]]
    """(name, path) -> the adapter with its tensors in CPU memory; AdapterError."""

    Place = Callable[[Mapping[str, Change]], Mapping[str, Change]]
    """Copies changes from CPU memory to the device (on the CPU itself: gives them back as they are)."""


class TieredDeltas(Mapping[str, "Change"]):
    """An adapter's changes by layer: what they are called always, what they are only while on the device.

    So the `Adapter` that requests hold stays one and the same while its tensors come and go.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = dict.fromkeys(names)
        self.placed: Mapping[str, Change] | None = None

    def __getitem__(self, layer: str) -> Change:
        if self.placed is None:
            raise InternalError(f"layer {layer}: the adapter's tensors are not on the device")
        return self.placed[layer]

    def get(self, layer: str, default: Any = None) -> Any:
        """As every mapping's, but quick: each layer of each step asks every adapter."""
        return self[layer] if self.placed is None else self.placed.get(layer, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, layer: object) -> bool:
        return layer in self._names


@dataclass(eq=False)
class Entry:
    """What one name means, from `load` or `register` to the release of its last lease. Guarded by the store's lock.

    adapter, report: None until its files were read for the first time. host: its changes in CPU memory, if they
    are there. num_leases: requests that hold it; num_users: those of them that steps use now, which keeps it on
    the device.
    """

    name: str
    path: AdapterPath
    pinned: bool = False
    adapter: Adapter | None = None
    report: LoadReport | None = None
    host: Mapping[str, Change] | None = None
    num_leases: int = 0
    num_users: int = 0
    coming: bool = False
    """It is being brought onto the device, and its bytes there are set aside."""
    fresh: bool = False
    """It came onto the device for requests of which none has used it yet."""
    last_used: int = 0
    came_at: int = 0
    error: Exception | None = None
    """Why bringing it in failed, until its requests have been told."""

    @property
    def deltas(self) -> TieredDeltas:
        if self.adapter is None or not isinstance(self.adapter.deltas, TieredDeltas):
            raise InternalError(f"adapter {self.name!r} has not been read")
        return self.adapter.deltas

    @property
    def on_device(self) -> bool:
        return self.adapter is not None and self.deltas.placed is not None

    @property
    def num_bytes(self) -> int:
        return 0 if self.adapter is None else self.adapter.num_bytes

    @property
    def holds_memory(self) -> bool:
        """Whether it has bytes anywhere, or bytes set aside for it."""
        return self.on_device or self.coming or self.host is not None

    @property
    def is_idle(self) -> bool:
        """Whether it may leave the device now."""
        waited_for = self.fresh and self.num_leases > 0
        return self.on_device and not (self.pinned or self.coming or self.num_users or waited_for)

    def has_content_of(self, other: Entry) -> bool:
        """Whether both have been read, and do the same to every request."""
        return None not in (self.adapter, other.adapter) and self.adapter.content == other.adapter.content  # type: ignore[union-attr]

    def take_in(self, adapter: Adapter, report: LoadReport) -> None:
        """Keep what reading the files gave. AdapterFormatError if they have changed since the first time."""
        if self.adapter is None:
            self.adapter, self.report = replace(adapter, deltas=TieredDeltas(tuple(adapter.deltas))), report
        elif self.adapter.content != adapter.content:
            raise AdapterFormatError(
                f"the files of adapter {self.name!r} have changed since it was loaded; load it again with replace"
            )
        self.host = adapter.deltas
