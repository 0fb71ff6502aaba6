"""A `polylens serve` process on loopback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 60


class ServerProcess:
    """A server that has said its address. `log` is what it has written so far on standard error."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        self.url = self._wait_for_address()

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self._lines.extend(self.process.stderr)

    def _wait_for_address(self) -> str:
        assert self.process.stdout is not None
        timer = threading.Timer(START_TIMEOUT_S, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        found = re.search(r"at (http://\S+)", line)
        assert found, f"{line!r}\n{self._ended_log()}"
        return found[1]

    def _ended_log(self) -> str:
        self.process.wait(STOP_TIMEOUT_S)
        self._reader.join(STOP_TIMEOUT_S)
        return self.log

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        finally:
            self.process.kill()


@contextmanager
def serving(*arguments: str | Path, **environment: str) -> Iterator[ServerProcess]:
    """`polylens serve` with these arguments, on a free port; stopped on leaving."""
    process = subprocess.Popen(
        [sys.executable, "-m", "polylens", "serve", *map(str, arguments), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
    )
    try:
        server = ServerProcess(process)
        yield server
        server.terminate()
    finally:
        process.kill()
        process.wait()
