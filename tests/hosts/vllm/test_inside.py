"""The runs inside vLLM, one process a family, in vLLM's own venv.

$POLYLENS_VLLM_PYTHON names its Python, as `make test` and run.sh do (see venv.sh); without it the runs are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("POLYLENS_VLLM_PYTHON", "")
FAMILIES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "gemma3",
    "llava",
    "internvl",
    "idefics3",
    "llava_onevision",
)
"""vLLM's flag for LoRA in towers does not list InternVL and LLaVA-OneVision."""
TIMEOUT_S = 560
NUM_CHECKS, NUM_SHORT_CHECKS, NUM_HALF_CHECKS = 17, 7, 2
"""Of `inside.CHECKS`, `inside.SHORT` and `inside.HALF`."""
NUM_PRESSURE_CHECKS, NUM_GPU_CHECKS, NUM_V2_CHECKS = 10, 10, 8
"""Of `pressure.CHECKS`, `gpu.CHECKS` and `v2.CHECKS`."""

pytestmark = pytest.mark.skipif(not PYTHON, reason="no environment with vLLM ($POLYLENS_VLLM_PYTHON)")


def run_module(python: str, module: str, *args: str | Path, path: list[Path], cache: Path) -> str:
    """Run a module of the tests; its output. Fails with the output if it does."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
        "POLYLENS_CACHE": str(cache),
    }
    done = subprocess.run(
        [python, "-m", module, *map(str, args)],
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


def make(family: str, folder: Path, *options: str) -> Path:
    """Checkpoint, adapters and references of a family."""
    path = [ROOT / "src", ROOT]
    run_module(sys.executable, "tests.hosts.vllm.checkpoints", folder, family, *options, path=path, cache=folder)
    return folder / family


def run_inside(module: str, cache: Path, *args: str | Path) -> str:
    here = [Path(__file__).parent / "site", ROOT / "src", ROOT]
    return run_module(PYTHON, f"tests.hosts.vllm.{module}", *args, path=here, cache=cache)


def num_ok(output: str) -> int:
    return sum(line.startswith("ok ") for line in output.splitlines())


def test_a_mixed_batch_equals_merged_models(tmp_path: Path):
    output = run_inside("inside", tmp_path, make("qwen2_vl", tmp_path, "--short"), "--short")
    assert num_ok(output) == NUM_SHORT_CHECKS


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_equal_merged_models(family: str, tmp_path: Path):
    """And rules proven in float32 serve bfloat16."""
    folder = make(family, tmp_path)
    assert num_ok(run_inside("inside", tmp_path, folder)) == NUM_CHECKS
    assert num_ok(run_inside("inside", tmp_path, folder, "--half")) == NUM_HALF_CHECKS


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "internvl", "llava_onevision"])
def test_an_engine_under_pressure(family: str, tmp_path: Path):
    output = run_inside("pressure", tmp_path, make(family, tmp_path, "--short"))
    assert num_ok(output) == NUM_PRESSURE_CHECKS


@pytest.mark.full
def test_other_options_of_vllm(tmp_path: Path):
    folder = make("qwen2_vl", tmp_path, "--short")
    for variant in ("text", "features", "default"):
        assert num_ok(run_inside("variants", tmp_path, folder, variant)) == 1


@pytest.mark.full
@pytest.mark.parametrize("options", [(), ("--data-parallel-size", "2")], ids=" ".join)
def test_the_openai_server_serves_two_adapters_at_once(options: tuple[str, ...], tmp_path: Path):
    assert "ok the server goes on" in run_inside("serve", tmp_path, make("qwen2_vl", tmp_path, "--short"), *options)


@pytest.mark.full
def test_vllms_own_manager_over_products_of_segments(tmp_path: Path):
    assert "0 wrong answers" in run_inside("stock", tmp_path, make("qwen2_vl", tmp_path))


@pytest.mark.full
def test_the_gpu_worker_and_both_runners_as_far_as_a_cpu_can_tell(tmp_path: Path):
    assert num_ok(run_inside("gpu", tmp_path)) == NUM_GPU_CHECKS


@pytest.mark.full
def test_the_v2_runner_by_tritons_interpreter(tmp_path: Path):
    folder = make("qwen2_vl", tmp_path)
    assert num_ok(run_inside("v2", tmp_path, folder)) == NUM_V2_CHECKS
    assert num_ok(run_inside("v2", tmp_path, folder, "--pressure")) == 1 + NUM_PRESSURE_CHECKS
