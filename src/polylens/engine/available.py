"""How many bytes an engine may take beside the model's weights."""

from __future__ import annotations

import os
from pathlib import Path

import torch

CPU_SHARE = 0.5
"""Of the memory that is free: a laptop runs other programs too, and processed pictures lie beside the plan."""

GPU_UTILIZATION = 0.9
"""Of the whole device's memory, weights included, as in vLLM: the rest is the driver's and the fragments'."""

_CGROUP = Path("/sys/fs/cgroup")

_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, usage, and what of the usage the kernel gives back when asked (files read, as a checkpoint's): version 2 of
control groups, and version 1."""


def budget_and_free(device: torch.device, gpu_memory_utilization: float | None = None) -> tuple[int, int]:
    """Bytes to divide by default, and bytes that may be taken where the user says so; once the weights are loaded."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        budget = int(total * (gpu_memory_utilization or GPU_UTILIZATION)) - torch.cuda.memory_reserved(device)
        return budget, budget
    free = free_memory()
    return int(free * CPU_SHARE), free


def free_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes of CPU memory this process can still get: the machine's, or its container's if that is less."""
    free = _machine_memory()
    for limit_file, used_file, cached in _CGROUP_FILES:
        limit, used = _number(cgroup / limit_file), _number(cgroup / used_file)
        if limit is not None and used is not None:
            taken = used - _field((cgroup / used_file).with_name("memory.stat"), cached)
            free = min(free, max(0, limit - taken))
    return free


def _machine_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):  # not Linux, or a sandbox's own /proc: all memory there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _number(file: Path) -> int | None:
    """The number in a cgroup file; None where there is no such file or no limit ("max")."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _field(file: Path, name: str) -> int:
    """The number after `name` in a file of "name number" lines; 0 where there is none."""
    try:
        lines = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
        return next((int(words[1]) for words in lines if words[:1] == [name]), 0)
    except (OSError, ValueError, IndexError):
        return 0
