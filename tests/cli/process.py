"""Run `polylens` as a person does: as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TIMEOUT_S = 300


def polylens(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """One thread, like the tests themselves: several run beside each other."""
    return subprocess.run(
        [sys.executable, "-m", "polylens", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
    )


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2, nothing on stdout, one line on stderr that has these words."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("polylens: error: ")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr


@contextmanager
def started(*arguments: str | Path, cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs; killed on leaving."""
    process = subprocess.Popen(
        [sys.executable, "-m", "polylens", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
