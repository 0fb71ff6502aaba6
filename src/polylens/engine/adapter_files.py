"""How an adapter gets from its files to CPU memory, and from there to the engine's device."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from polylens.adapters.combine import Combination
from polylens.adapters.load import load_adapter
from polylens.adapters.read import find_adapter, refuse_pickle
from polylens.errors import InternalError
from polylens.lora.arena import pack

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch

    from polylens.adapters.load import AdapterPath, LoadReport
    from polylens.core import Adapter, Change, ModelLayers


class AdapterFiles:
    """Reads adapters for one model and copies them to its device. Thread-safe.

    pickles: whether weights in a pickle (`adapter_model.bin`) are read; if not, they are refused at every reading.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, *, pickles: bool = True) -> None:
        self._pickles = pickles
        self._dtype = dtype
        self._device = device
        self._lock = threading.Lock()
        self._described: tuple[ModelLayers, frozenset[str]] | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether the device's memory is CPU memory."""
        return self._device.type == "cpu"

    def describe_model(self, layers: ModelLayers, no_effect: Collection[str]) -> None:
        """Tell which layers an adapter may change; nothing can be read before."""
        with self._lock:
            self._described = (layers, frozenset(no_effect))

    def read(self, name: str, path: AdapterPath) -> tuple[Adapter, LoadReport]:
        """The adapter at `path` in one buffer of CPU memory. Raises AdapterError."""
        with self._lock:
            if self._described is None:
                raise InternalError("an adapter was read before the model's layers were known")
            layers, no_effect = self._described
        if not self._pickles:
            for part in path.parts if isinstance(path, Combination) else ((path, 1.0),):
                refuse_pickle(find_adapter(part[0]))
        return load_adapter(path, layers, name=name, dtype=self._dtype, device="cpu", no_effect=no_effect, pack=pack)

    def place(self, deltas: Mapping[str, Change]) -> Mapping[str, Change]:
        """The changes on the device; the same ones where that is the CPU."""
        return deltas if self.on_cpu else pack(deltas, self._device)[1]
