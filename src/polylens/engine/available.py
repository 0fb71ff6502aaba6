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
    limit, used = (_number(cgroup / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def _machine_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux: all memory there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _number(file: Path) -> int | None:
    """The number in a cgroup file; None where there is no such file or no limit ("max")."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
