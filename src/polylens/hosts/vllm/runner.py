"""vLLM's V1 model runner with polylens' adapters in it: the one of its CPU build, and on GPUs with
VLLM_USE_V2_MODEL_RUNNER=0 (not run on a GPU)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.worker import gpu_model_runner

from polylens.hosts.vllm.base import read_base
from polylens.hosts.vllm.encoder import GROUPING, EncoderCalls
from polylens.hosts.vllm.manager import AdapterManager
from polylens.hosts.vllm.model import AdaptedModel
from polylens.hosts.vllm.reach import NUM_TOKENS
from polylens.hosts.vllm.seams import check_seam

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import VllmConfig

    from polylens.core import Adapter


class LoadsAdapters:
    """What the mixins of both runners share: vLLM's LoRA manager is ours."""

    vllm_config: VllmConfig
    lora_config: Any

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's, which builds the base model as it does without LoRA: for its own LoRA it takes other kernels (for
        experts, ones that its CPU build does not have)."""
        self.vllm_config.lora_config = None
        try:
            super().load_model(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.vllm_config.lora_config = self.lora_config

    def load_lora_model(self, model: nn.Module, vllm_config: VllmConfig, device: torch.device) -> nn.Module:
        """Called by vLLM when the base model is loaded."""
        vllm_config.lora_config = self.lora_config
        base = read_base(vllm_config.model_config)
        self.adapted = AdaptedModel(model, base, vllm_config.model_config, device)
        self.lora_manager = AdapterManager(self.adapted, base, vllm_config, device)
        self.encoder_calls = EncoderCalls(self.adapted)
        return model

    def finish_loading(self) -> None:
        """Called by our worker when the runner could run: what the text model does not run takes no adapter."""
        self.adapted.check_text_layers(self.run_text, NUM_TOKENS)
        self.lora_manager.tell_refused()

    def run_text(self) -> None:
        """Run the text model on NUM_TOKENS tokens without a KV cache, as vLLM does to measure its memory."""
        raise NotImplementedError

    def reset_lora_state(self) -> None:
        """Called by vLLM when base weights were replaced: what was proven of the old ones does not hold."""
        raise NotImplementedError("base weights cannot be replaced under polylens' adapters: start vLLM anew")


class AdapterRunnerMixin(LoadsAdapters):
    """To be put before a V1 runner class of vLLM's."""

    def run_text(self) -> None:
        self._dummy_run(NUM_TOKENS, is_profile=True)  # type: ignore[attr-defined]

    def _batch_mm_inputs_from_scheduler(self, scheduler_output: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """As vLLM's, ordered by adapter inside a modality, and noting whose every item is."""
        hashes, pairs, refs = super()._batch_mm_inputs_from_scheduler(scheduler_output)  # type: ignore[misc]
        pairs = [
            self.encoder_calls.note(pair, place.get_num_embeds(), self._adapter_of(request_id))
            for pair, (request_id, place) in zip(pairs, refs, strict=True)
        ]
        order = self.encoder_calls.order(pairs)
        return [hashes[i] for i in order], [pairs[i] for i in order], [refs[i] for i in order]

    def _execute_mm_encoder(self, scheduler_output: Any) -> list[torch.Tensor]:
        """vLLM's, with each encoder call routed by the items that it holds."""
        with self.encoder_calls.routed(gpu_model_runner):
            return super()._execute_mm_encoder(scheduler_output)  # type: ignore[misc]

    def _adapter_of(self, request_id: str) -> Adapter | None:
        index = self.input_batch.req_id_to_index[request_id]  # type: ignore[attr-defined]
        return self.lora_manager.adapter(int(self.input_batch.request_lora_mapping[index]))  # type: ignore[attr-defined]


def check_runner(runner: type) -> None:
    """Raise ModelLoadError if this runner class of vLLM's is not what the mixin was written for."""
    check_seam(runner, "load_lora_model", ("model", "vllm_config", "device"))
    check_seam(runner, "reset_lora_state", ())
    check_seam(runner, "load_model", ("load_dummy_weights",))
    check_seam(runner, "_batch_mm_inputs_from_scheduler", ("scheduler_output",))
    check_seam(runner, "_execute_mm_encoder", ("scheduler_output",))
    check_seam(runner, "_dummy_run", ("num_tokens", "is_profile"))
    check_seam(gpu_model_runner, GROUPING, ("mm_kwargs", "device", "pin_memory"))
