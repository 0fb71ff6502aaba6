"""How an adapter gets from its files to CPU memory, and from there to the engine's device."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from polylens.adapters.combine import Combination
from polylens.adapters.load import load_adapter
from polylens.adapters.processing_files import read_processing_files
from polylens.adapters.read import find_adapter, refuse_pickle
from polylens.core import LayerKind, Replacement, TokenRows
from polylens.errors import AdapterError, InternalError
from polylens.lora.arena import pack
from polylens.models.adapter_processing import AdapterProcessings, differences
from polylens.models.parts import token_embedding

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from polylens.adapters.load import AdapterPath, LoadReport
    from polylens.config import EngineConfig
    from polylens.core import Adapter, Change, ModelLayers, ProcessingFiles
    from polylens.models.loading import LoadedModel
    from polylens.models.processing import Processing


class AdapterFiles:
    """Reads adapters for one model and copies them to its device. Thread-safe.

    It also finds out how their requests are processed. `config.read_pickles`: whether weights in a pickle
    (`adapter_model.bin`) are read; if not, they are refused at every reading.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self._loaded = loaded
        self._pickles = config.read_pickles
        self._dtype = loaded.dtype
        self._device = loaded.device
        self._settings, self._templates = config.adapter_processors, config.adapter_templates
        self._processings = AdapterProcessings(loaded.processing, loaded.config, loaded.model.generation_config)
        self._lock = threading.Lock()
        self._described: tuple[ModelLayers, frozenset[str]] | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether the device's memory is CPU memory."""
        return self._device.type == "cpu"

    def describe_model(self, layers: ModelLayers, no_effect: Collection[str]) -> None:
        """Tell which layers an adapter may change; nothing can be read before."""
        # transformers' own generation expects logits of the model's tokens.
        layers = replace(layers, more_tokens=layers.more_tokens and not self._loaded.is_hosted)
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
        files = read_processing_files(path, settings=self._settings, templates=self._templates)
        adapter, report = load_adapter(
            path, layers, name=name, dtype=self._dtype, device="cpu", no_effect=no_effect, pack=pack
        )
        num_rows = token_embedding(self._loaded.model).get_parameter("weight").shape[0]
        processing = self._processing(files, path, _embedding_rows(adapter, layers, num_rows))
        if processing is self._loaded.processing:
            return adapter, report
        brought = differences(self._loaded.processing, processing)
        adapter = replace(adapter, processing=processing, processing_digest=files.digest)
        return adapter, replace(report, processing=brought)

    def processing(self, path: AdapterPath) -> Processing:
        """The processing of the adapter's requests, without reading its tensors. Raises AdapterError."""
        files = read_processing_files(path, settings=self._settings, templates=self._templates)
        return self._processing(files, path, sys.maxsize)

    def _processing(self, files: ProcessingFiles, path: AdapterPath, num_rows: int) -> Processing:
        try:
            return self._processings.of(files, num_rows)
        except AdapterError as error:
            # The switches are told where they help, and the files themselves may be the ones to mend.
            raise type(error)(f"adapter {str(path)!r}: {error}{_ADVICE}") from error

    def place(self, deltas: Mapping[str, Change]) -> Mapping[str, Change]:
        """The changes on the device; the same ones where that is the CPU."""
        return deltas if self.on_cpu else pack(deltas, self._device)[1]


_ADVICE = "; mend or remove these files, or turn them off (adapter_templates, adapter_processors)"


def _embedding_rows(adapter: Adapter, layers: ModelLayers, num_rows: int) -> int:
    """Rows of the token embedding, of which the model has `num_rows`, with those that the adapter brings."""
    embeddings = [spec.name for spec in layers.specs.values() if spec.kind is LayerKind.EMBEDDING]
    for change in (adapter.deltas[name] for name in embeddings if name in adapter.deltas):
        if isinstance(change, Replacement) and change.weight is not None:
            num_rows = max(num_rows, change.weight.shape[0])
        if isinstance(change, TokenRows):
            num_rows = max(num_rows, max(change.token_ids) + 1)
    return num_rows
