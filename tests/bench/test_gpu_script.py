"""The GPU script's own flow, on the CPU: there its kernels are torch's, so only the script is tried."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.full
def test_it_checks_and_then_measures() -> None:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--dtype", "float32", "--rounds", "1", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    checks = [line for line in lines if "kernels" in line]
    assert len(checks) == 36
    assert all(line["ok"] for line in checks)
    assert sum("question" in line for line in lines) >= 15
