"""Adapters in a vLLM worker: what vLLM asks of its LoRA manager, over polylens' own adapters.

No slots and no padding to a rank: an adapter is as large as its tensors, and the model's layers take any number of
them. `max_cpu_loras` (by default `max_loras`) is how many are kept, and that many of rank `max_lora_rank` are what
memory is kept for: larger ones push others out earlier.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from polylens.adapters import load_adapter
from polylens.errors import AdapterConflictError
from polylens.hosts.vllm.names import content_id, digest_in_name, read_stamp, stamped
from polylens.hosts.vllm.refused import check_layers, tell_refused
from polylens.lora.arena import pack

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.request import LoRARequest

    from polylens.core import Adapter
    from polylens.hosts.vllm.base import BaseModel
    from polylens.hosts.vllm.model import AdaptedModel

logger = logging.getLogger(__name__)


class AdapterManager:
    """The adapters of one worker, by vLLM's number of them (see `names.content_id`)."""

    def __init__(self, model: AdaptedModel, base: BaseModel, config: VllmConfig, device: torch.device) -> None:
        self._model = model
        self._base = base
        self._config = config
        self._device = device
        self._dtype = config.model_config.dtype
        self._capacity: int = config.lora_config.max_cpu_loras
        self._adapters: OrderedDict[int, Adapter | None] = OrderedDict()
        self._pinned: set[int] = set()
        self._number_of: dict[int, int] = {}

    def tell_refused(self) -> None:
        """Let the front process know what cannot be adapted."""
        tell_refused(self._config, self._model.refused)

    @property
    def reserved_bytes(self) -> int:
        """Memory to keep for adapters: `max_cpu_loras` of them, each with factors of `max_lora_rank` everywhere."""
        rank: int = self._config.lora_config.max_lora_rank
        return self._capacity * rank * self._model.num_factor_features() * self._dtype.itemsize

    # What vLLM asks while it serves

    def set_active_adapters(self, requests: set[LoRARequest], mapping: LoRAMapping | None) -> None:
        """The adapters of the step that comes, and whose every row of it is."""
        for request in requests:
            self._require(request)
        if mapping is not None:
            active = {0: None, **self._adapters}
            self._model.set_text_rows(
                [active[number] for number in mapping.index_mapping],
                [active[number] for number in mapping.prompt_mapping],
            )
        self._evict({request.lora_int_id for request in requests})

    def adapter(self, number: int) -> Adapter | None:
        """The adapter of a request in the step that runs; None for the base model (number 0)."""
        return self._adapters[number] if number else None

    def supports_tower_connector_lora(self) -> bool:
        """No: vLLM must not count the encoder's rows, which polylens measures."""
        return False

    # What vLLM asks when adapters are loaded and removed

    def add_adapter(self, request: LoRARequest) -> bool:
        """Load an adapter, or load it anew: whether it was not there. Raises AdapterError."""
        name, digest = read_stamp(request.lora_name)
        if digest is not None:
            new = request.lora_int_id not in self._adapters
            self._require(request)
            return new
        adapter = self._load(name, request.lora_path)
        number = content_id(stamped(name, adapter.digests))
        new = number not in self._adapters
        self._adapters[number] = adapter
        self._number_of[request.lora_int_id] = number
        self._evict({number})
        return new

    def remove_adapter(self, adapter_id: int) -> bool:
        number = self._number_of.pop(adapter_id, adapter_id)
        self._pinned.discard(number)
        return self._adapters.pop(number, None) is not None

    def pin_adapter(self, adapter_id: int) -> bool:
        number = self._number_of.get(adapter_id, adapter_id)
        if number not in self._adapters:
            raise ValueError(f"adapter {adapter_id} cannot be pinned: it is not loaded")
        self._pinned.add(number)
        return True

    def list_adapters(self) -> set[int]:
        known = {given: number for given, number in self._number_of.items() if number in self._adapters}
        return set(known) | (set(self._adapters) - set(known.values()))

    def remove_all_adapters(self) -> None:
        """vLLM calls it after each run of dummies too, of which a data-parallel engine without requests makes one a
        step: then only they go."""
        self._model.set_text_rows((), ())
        if None in self._adapters.values():
            self._adapters = OrderedDict((number, one) for number, one in self._adapters.items() if one is not None)
            return
        self._adapters.clear()
        self._pinned.clear()
        self._number_of.clear()

    # What vLLM asks to warm up with: the base model stands for every dummy

    @contextmanager
    def dummy_lora_cache(self) -> Iterator[None]:
        yield

    def add_dummy_lora(self, request: LoRARequest, rank: int) -> bool:
        self._adapters[request.lora_int_id] = None
        return True

    def get_dummy_lora_warmup_rank(self, default_rank: int) -> int:
        return default_rank

    # Loading

    def _require(self, request: LoRARequest) -> None:
        """Have the adapter of a request, of exactly the content that its name says."""
        number = request.lora_int_id
        if number in self._adapters:
            self._adapters.move_to_end(number)
            return
        name, digest = read_stamp(request.lora_name)
        if digest is None:
            raise AdapterConflictError(
                f"adapter {name!r} came to the worker without the digest of its content: polylens' plugin does not run "
                "in vLLM's front process (is VLLM_PLUGINS set without 'polylens'?)"
            )
        adapter = self._load(name, request.lora_path)
        if digest_in_name(adapter.digests) != digest:
            raise AdapterConflictError(
                f"adapter {name!r} changed at {request.lora_path!r} while a request was on its way"
            )
        self._adapters[number] = adapter

    def _load(self, name: str, path: str) -> Adapter:
        adapter, report = load_adapter(
            path,
            replace(self._base.layers, more_tokens=False),
            name=name,
            dtype=self._dtype,
            device=self._device,
            no_effect=self._model.absent,
            pack=pack,
        )
        check_layers(adapter.deltas, self._model.refused, name)
        for warning in report.warnings:
            logger.warning("adapter %r: %s", name, warning)
        return adapter

    def _evict(self, needed: set[int]) -> None:
        """Forget the longest unused adapters beyond the capacity: not those of this step, not pinned ones."""
        free = [number for number in self._adapters if number not in needed and number not in self._pinned]
        while free and self._is_over():
            del self._adapters[free.pop(0)]

    def _is_over(self) -> bool:
        num_bytes = sum(adapter.num_bytes for adapter in self._adapters.values() if adapter is not None)
        return len(self._adapters) > self._capacity or num_bytes > self.reserved_bytes
