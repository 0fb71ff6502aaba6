"""The runs inside vLLM, one process a family, in vLLM's own venv.

$POLYLENS_VLLM_PYTHON names its Python, else the cached venv's is taken (see run.sh); without either the runs are
skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CACHED = Path.home() / "venvs" / "vllm" / "bin" / "python"
PYTHON = Path(os.environ.get("POLYLENS_VLLM_PYTHON", CACHED))
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "llava", "internvl", "idefics3")
"""vLLM's flag for LoRA in towers does not list InternVL."""
TIMEOUT_S = 560
NUM_CHECKS = 13
"""Of `inside.CHECKS`."""
NUM_GPU_CHECKS, NUM_V2_CHECKS = 9, 8
"""Of `gpu.CHECKS` and `v2.CHECKS`."""

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no venv with vLLM at {PYTHON} ($POLYLENS_VLLM_PYTHON)"),
]


def run_module(python: str | Path, module: str, *args: str | Path, path: list[Path]) -> str:
    """Run a module of the tests; its output. Fails with the output if it does."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(python), "-m", module, *map(str, args)],
        env=env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    lines = [line for line in done.stdout.splitlines() if not line.startswith(("(", "WARNING", "INFO"))]
    assert done.returncode == 0, "\n".join(lines[-60:])
    return "\n".join(lines)


def make(family: str, folder: Path) -> Path:
    """Checkpoint, adapters and references of a family."""
    run_module(sys.executable, "tests.hosts.vllm.checkpoints", folder, family, path=[ROOT / "src", ROOT])
    return folder / family


def run_inside(module: str, *args: Path) -> str:
    here = [Path(__file__).parent / "site", ROOT / "src", ROOT]
    return run_module(PYTHON, f"tests.hosts.vllm.{module}", *args, path=here)


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_equal_merged_models(family: str, tmp_path: Path):
    output = run_inside("inside", make(family, tmp_path))
    assert "FAILED" not in output
    assert sum(line.startswith("ok ") for line in output.splitlines()) == NUM_CHECKS


def test_the_openai_server_serves_two_adapters_at_once(tmp_path: Path):
    assert "ok the server goes on" in run_inside("serve", make("qwen2_vl", tmp_path))


def test_vllms_own_manager_over_products_of_segments(tmp_path: Path):
    assert "0 wrong answers" in run_inside("stock", make("qwen2_vl", tmp_path))


def test_the_gpu_worker_and_both_runners_as_far_as_a_cpu_can_tell():
    output = run_inside("gpu")
    assert "FAILED" not in output
    assert sum(line.startswith("ok ") for line in output.splitlines()) == NUM_GPU_CHECKS


def test_the_v2_runner_by_tritons_interpreter(tmp_path: Path):
    output = run_inside("v2", make("qwen2_vl", tmp_path))
    assert "FAILED" not in output
    assert sum(line.startswith("ok ") for line in output.splitlines()) == NUM_V2_CHECKS
