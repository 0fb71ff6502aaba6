"""What the system tells of the CPU."""

from __future__ import annotations

import functools
import platform
from pathlib import Path


@functools.cache
def _told() -> frozenset[str]:
    """Lines, without those that stand there once a core; none where the system is not Linux."""
    try:
        return frozenset(Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines())
    except OSError:
        return frozenset()


def processor_name() -> str:
    """What the system calls the CPU."""
    names = {line.partition(":")[2].strip() for line in _told() if line.startswith("model name")}
    return ", ".join(sorted(names)) or platform.processor() or platform.machine()


def instructions() -> str:
    """What `-march=native` depends on, as far as the system tells it."""
    lines = sorted(line for line in _told() if line.startswith(("model name", "flags", "Features")))
    return "\n".join(lines) or platform.processor()
