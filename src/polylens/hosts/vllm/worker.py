"""vLLM's CPU worker with polylens' adapters in it. Named by `--worker-cls polylens.hosts.vllm.Worker`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.v1.worker.cpu_worker import CPUWorker

from polylens.errors import ModelLoadError
from polylens.hosts.vllm.front import check_installed
from polylens.hosts.vllm.runner import AdapterRunnerMixin, check_runner
from polylens.hosts.vllm.seams import check_seam, check_version, refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Worker(CPUWorker):
    """Raises ModelLoadError at start for what polylens does not do inside vLLM, or was not tested with."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        check_version()
        check_seam(CPUWorker, "init_device", ())
        check_installed()
        if not current_platform.is_cpu():
            raise ModelLoadError("polylens inside vLLM was only run on CPUs yet: use vLLM's CPU build")
        if reason := refusal(vllm_config):
            raise ModelLoadError(f"polylens inside vLLM does not serve {reason}")
        if vllm_config.lora_config is None:
            raise ModelLoadError("polylens' worker serves adapters: start vLLM with --enable-lora (enable_lora=True)")
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        super().init_device()
        if self.use_v2_model_runner:
            raise ModelLoadError("polylens inside vLLM needs the V1 model runner: set VLLM_USE_V2_MODEL_RUNNER=0")
        runner = type(self.model_runner)
        check_runner(runner)
        self.model_runner.__class__ = type(f"Adapter{runner.__name__}", (AdapterRunnerMixin, runner), {})
