"""Run `polylens`: in this process, or as a person does, in one of its own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest

from polylens.cli import main

TIMEOUT_S = 300

Done = subprocess.CompletedProcess[str]


def polylens(*arguments: str | Path, cwd: Path | None = None) -> Done:
    """The command in this process, which has imported already what takes a new one seconds. What it prints and exits
    with; what libraries print beside it only a process of its own shows (`polylens_process`)."""
    line = ["polylens", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", line),
        patch.dict(os.environ),
        chdir(cwd) if cwd is not None else nullcontext(),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main.main()
    return Done(line, int(ended.value.code or 0), out.getvalue(), err.getvalue())


def polylens_process(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> Done:
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


def assert_refused(done: Done, *words: str) -> None:
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
