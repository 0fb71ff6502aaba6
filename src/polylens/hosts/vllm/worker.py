"""vLLM's worker with polylens' adapters in it. Named by `--worker-cls polylens.hosts.vllm.Worker`.

It is made of the worker that vLLM has for the platform: the one for CPUs has been run, the one for CUDA GPUs has not
been run on a GPU.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from polylens.errors import ModelLoadError
from polylens.hosts.vllm.front import check_installed
from polylens.hosts.vllm.seams import check_seam, check_version, refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)


class AdapterWorkerMixin:
    """To be put before a worker class of vLLM's. Raises ModelLoadError at start for what polylens does not do inside
    vLLM, or was not tested with."""

    vllm_config: VllmConfig
    model_runner: Any

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        check_version()
        check_installed()
        if reason := refusal(vllm_config):
            raise ModelLoadError(f"polylens inside vLLM does not serve {reason}")
        if vllm_config.lora_config is None:
            raise ModelLoadError("polylens' worker serves adapters: start vLLM with --enable-lora (enable_lora=True)")
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]

    def init_device(self) -> None:
        """vLLM makes its runner here, of either kind; it becomes one of ours before it loads anything."""
        super().init_device()  # type: ignore[misc]
        adapt_runner(self.model_runner)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        from vllm.config import set_current_vllm_config

        super().load_model(*args, **kwargs)  # type: ignore[misc]
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.finish_loading()

    def determine_available_memory(self) -> int:
        """vLLM's bytes for KV pages, less what adapters will take: their memory is not there yet when it measures."""
        found: int = super().determine_available_memory()  # type: ignore[misc]
        if self.vllm_config.cache_config.kv_cache_memory_bytes:
            return found  # as large as was asked for
        kept: int = self.model_runner.lora_manager.reserved_bytes
        logger.info("%.2f GiB of %.2f GiB are kept for adapters", kept / 2**30, found / 2**30)
        return found - kept


def adapt_runner(runner: Any) -> None:
    """Make a model runner of vLLM's, V1 or V2, one that has polylens' adapters. Raises ModelLoadError."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if isinstance(runner, GPUModelRunner):
        from polylens.hosts.vllm.runner import AdapterRunnerMixin, check_runner

        mixin: type = AdapterRunnerMixin
    else:
        from polylens.hosts.vllm.runner_v2 import AdapterRunnerV2Mixin, check_runner

        mixin = AdapterRunnerV2Mixin
    own = type(runner)
    check_runner(own)
    runner.__class__ = type(f"Adapter{own.__name__}", (mixin, own), {})


def platform_worker() -> type:
    """vLLM's worker for this machine. Raises ModelLoadError where there is none that polylens was written for."""
    # Not both: each prepares torch for its own platform when it is imported.
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    if current_platform.is_cuda():
        from vllm.v1.worker.gpu_worker import Worker as GPUWorker

        return GPUWorker
    raise ModelLoadError("polylens inside vLLM was written for CPUs and for CUDA GPUs")


def make_worker(base: type) -> type:
    """Our worker over vLLM's `base`. Raises ModelLoadError if that is not what the mixin was written for."""
    check_seam(base, "init_device", ())
    check_seam(base, "load_model", ())
    check_seam(base, "determine_available_memory", ())
    return type("Worker", (AdapterWorkerMixin, base), {"__module__": __name__, "__doc__": AdapterWorkerMixin.__doc__})


Worker = make_worker(platform_worker())
