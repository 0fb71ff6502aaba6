"""vLLM's V2 model runner, its Triton kernels run by Triton's interpreter: `python -m tests.hosts.vllm.v2 FOLDER`,
with `--pressure` the checks of that module.

vLLM's CPU build has that runner, for a Triton with a CPU backend; the published Triton has none, and its interpreter
stands for it. So the runner that vLLM takes on GPUs by itself is run here, on a CPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")

import triton.backends

triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)

from vllm.v1.worker.gpu.model_runner import GPUModelRunner  # noqa: E402

from tests.hosts.vllm import inside, pressure  # noqa: E402


def the_runner_is_the_v2_one(found: inside.Inside) -> None:
    assert isinstance(found.runner, GPUModelRunner)


CHECKS = (
    the_runner_is_the_v2_one,
    inside.alone,
    inside.many_items_in_a_step,
    inside.image_and_video_in_a_step,
    inside.one_at_a_time,
    inside.replaced_under_one_name,
    inside.prompt_logprobs_of_changed_heads,
    inside.special_adapters,
)

if __name__ == "__main__":
    under_pressure = sys.argv[2:] == ["--pressure"]
    options, checks = (pressure.OPTIONS, (CHECKS[0], *pressure.CHECKS)) if under_pressure else ({}, CHECKS)
    inside.finish(inside.Inside(Path(sys.argv[1]), **options), checks)
