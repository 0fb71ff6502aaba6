"""vLLM's V2 model runner with polylens' adapters in it: the one that it takes on GPUs by itself.

Not run on a GPU; run on a CPU, with Triton's interpreter (tests/hosts/vllm/v2.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.mm import encoder_runner
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

from polylens.hosts.vllm.encoder import GROUPING
from polylens.hosts.vllm.reach import NUM_TOKENS
from polylens.hosts.vllm.runner import LoadsAdapters
from polylens.hosts.vllm.seams import check_seam

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn
    from vllm.config import VllmConfig

    from polylens.core import Adapter
    from polylens.hosts.vllm.encoder import EncoderCalls, Pair


class AdapterRunnerV2Mixin(LoadsAdapters):
    """To be put before a V2 runner class of vLLM's."""

    lora_state: LoraState

    def load_lora_model(self, model: nn.Module, vllm_config: VllmConfig, device: torch.device) -> nn.Module:
        """Called by vLLM when the base model is loaded."""
        # 32 bits there; an adapter's number, which is made of its content, has 62.
        self.lora_state.lora_ids = self.lora_state.lora_ids.astype(np.int64)
        return super().load_lora_model(model, vllm_config, device)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM makes what runs its encoder after the model is loaded."""
        super().load_model(*args, **kwargs)
        found = getattr(self.model_state, "encoder_runner", None)  # type: ignore[attr-defined]
        if found is not None:
            adapt_encoder_runner(found, self)

    def run_text(self) -> None:
        self._dummy_run(NUM_TOKENS, skip_attn=True, is_profile=True)  # type: ignore[attr-defined]

    def adapter_of(self, request_id: str) -> Adapter | None:
        """The adapter of a request of the step that runs."""
        request = self.lora_state.lora_requests.get(request_id)
        return None if request is None else self.lora_manager.adapter(request.lora_int_id)


class AdapterEncoderMixin:
    """To be put before vLLM's `EncoderRunner`."""

    adapter_runner: AdapterRunnerV2Mixin

    @property
    def _calls(self) -> EncoderCalls:
        return self.adapter_runner.encoder_calls

    def prepare_mm_inputs(self, scheduled_encoder_inputs: Mapping[str, list[int]]) -> tuple[list[str], list[Pair]]:
        """As vLLM's, ordered by adapter inside a modality, and noting whose every item is."""
        hashes: list[str] = []
        pairs: list[Pair] = []
        for request_id, indices in scheduled_encoder_inputs.items():
            owner = self.adapter_runner.adapter_of(request_id)
            features = self.encoder_cache.mm_features[request_id]  # type: ignore[attr-defined]
            for index in indices:
                # One at a time: vLLM leaves out what needs no encoding, and does not say which.
                kept, found = super().prepare_mm_inputs({request_id: [index]})  # type: ignore[misc]
                num_tokens = features[index].mm_position.get_num_embeds()
                hashes += kept
                pairs += [self._calls.note(pair, num_tokens, owner) for pair in found]
        order = self._calls.order(pairs)
        return [hashes[i] for i in order], [pairs[i] for i in order]

    def execute_mm_encoder(self, mm_kwargs: list[Pair]) -> list[torch.Tensor]:
        """vLLM's, with each encoder call routed by the items that it holds."""
        with self._calls.routed(encoder_runner):
            return super().execute_mm_encoder(mm_kwargs)  # type: ignore[misc]


def adapt_encoder_runner(found: EncoderRunner, runner: AdapterRunnerV2Mixin) -> None:
    """Make vLLM's `EncoderRunner` one that asks `runner` whose items are."""
    own = type(found)
    found.adapter_runner = runner
    found.__class__ = type(f"Adapter{own.__name__}", (AdapterEncoderMixin, own), {})


def check_runner(runner: type) -> None:
    """Raise ModelLoadError if this runner class of vLLM's is not what the mixin was written for."""
    check_seam(runner, "load_lora_model", ("model", "vllm_config", "device"))
    check_seam(runner, "reset_lora_state", ())
    check_seam(runner, "load_model", ("load_dummy_weights",))
    check_seam(runner, "_dummy_run", ("num_tokens", "skip_attn", "is_profile"))
    check_seam(LoraState, "add_request", ("req_id", "req_index", "lora_request"))
    check_seam(LoraState, "make_lora_inputs", ("req_ids", "idx_mapping", "num_scheduled_tokens"))
    check_seam(EncoderRunner, "prepare_mm_inputs", ("scheduled_encoder_inputs",))
    check_seam(EncoderRunner, "execute_mm_encoder", ("mm_kwargs",))
    check_seam(encoder_runner, GROUPING, ("mm_kwargs", "device", "pin_memory"))
