"""vLLM's model runner with polylens' adapters in it, and with encoder calls that know whose items they hold.

Written against the V1 runner, which vLLM's CPU build uses.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from vllm.v1.worker import gpu_model_runner

from polylens.hosts.vllm.base import read_base
from polylens.hosts.vllm.items import EncoderItem
from polylens.hosts.vllm.manager import AdapterManager
from polylens.hosts.vllm.model import AdaptedModel
from polylens.hosts.vllm.seams import check_seam

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import VllmConfig

    from polylens.core import Adapter


class AdapterRunnerMixin:
    """To be put before a V1 runner class of vLLM's."""

    def load_lora_model(self, model: nn.Module, vllm_config: VllmConfig, device: torch.device) -> nn.Module:
        """Called by vLLM when the base model is loaded."""
        base = read_base(vllm_config.model_config)
        self.adapted = AdaptedModel(model, base, vllm_config.model_config, device)
        self.lora_manager = AdapterManager(self.adapted, base, vllm_config, device)
        return model

    def reset_lora_state(self) -> None:
        """Called by vLLM when base weights were replaced: what was proven of the old ones does not hold."""
        raise NotImplementedError("base weights cannot be replaced under polylens' adapters: start vLLM anew")

    def _batch_mm_inputs_from_scheduler(self, scheduler_output: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """As vLLM's, ordered by adapter inside a modality, and noting whose every item is."""
        hashes, pairs, refs = super()._batch_mm_inputs_from_scheduler(scheduler_output)  # type: ignore[misc]
        # One object may stand for the same picture of two requests: its copy is this request's alone.
        pairs = [(modality, copy.copy(data)) for modality, data in pairs]
        owners = [self._adapter_of(request_id) for request_id, _ in refs]
        ranks = {owner: rank for rank, owner in enumerate(dict.fromkeys(owners))}
        order = sorted(range(len(pairs)), key=lambda i: (pairs[i][0], ranks[owners[i]]))
        self.encoder_owners = {
            id(data): (EncoderItem(modality, data, ref.get_num_embeds()), owner)
            for (modality, data), (_, ref), owner in zip(pairs, refs, owners, strict=True)
        }
        return [hashes[i] for i in order], [pairs[i] for i in order], [refs[i] for i in order]

    def _execute_mm_encoder(self, scheduler_output: Any) -> list[torch.Tensor]:
        """vLLM's, with each encoder call routed by the items that it holds."""
        grouped = gpu_model_runner.group_and_batch_mm_kwargs

        def routed_groups(pairs: Any, **kwargs: Any) -> Iterator[Any]:
            return self._routed_groups(grouped, pairs, **kwargs)

        gpu_model_runner.group_and_batch_mm_kwargs = routed_groups
        try:
            return super()._execute_mm_encoder(scheduler_output)  # type: ignore[misc]
        finally:
            gpu_model_runner.group_and_batch_mm_kwargs = grouped
            self.adapted.set_encoder_rows((), ())
            self.encoder_owners = {}

    def _routed_groups(self, grouped: Any, pairs: list[Any], **kwargs: Any) -> Iterator[Any]:
        """vLLM's groups of items, cut where an adapter must be alone; the caller encodes each before it asks on."""
        for run in _runs(pairs, self._mixing_key):
            start = 0
            for modality, num_items, batch in grouped(run, **kwargs):
                known = [self.encoder_owners[id(data)] for _, data in run[start : start + num_items]]
                start += num_items
                # Not undone when this generator ends: vLLM takes one group of it, drops it, and encodes then.
                self.adapted.set_encoder_rows([item for item, _ in known], [owner for _, owner in known])
                yield modality, num_items, batch

    def _mixing_key(self, pair: Any) -> Any:
        modality, data = pair
        return modality, None if self.adapted.may_mix(modality) else self.encoder_owners[id(data)][1]

    def _adapter_of(self, request_id: str) -> Adapter | None:
        index = self.input_batch.req_id_to_index[request_id]  # type: ignore[attr-defined]
        return self.lora_manager.adapter(int(self.input_batch.request_lora_mapping[index]))  # type: ignore[attr-defined]


def _runs(pairs: list[Any], key: Any) -> Iterator[list[Any]]:
    for _, run in groupby(pairs, key=key):
        yield list(run)


def check_runner(runner: type) -> None:
    """Raise ModelLoadError if this runner class of vLLM's is not what the mixin was written for."""
    check_seam(runner, "load_lora_model", ("model", "vllm_config", "device"))
    check_seam(runner, "reset_lora_state", ())
    check_seam(runner, "_batch_mm_inputs_from_scheduler", ("scheduler_output",))
    check_seam(runner, "_execute_mm_encoder", ("scheduler_output",))
    check_seam(gpu_model_runner, "group_and_batch_mm_kwargs", ("mm_kwargs", "device", "pin_memory"))
