"""How much memory a piece of work needs at its peak, beyond what is there when it starts."""

from __future__ import annotations

import gc
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MEMORY_EVENT = "[memory]"
"""The profiler's name for an allocation (bytes > 0) or a release (bytes < 0)."""


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """Run `work`; returns the most bytes of torch tensors on `device` at a time, less those before it.

    On the CPU every allocation is traced by torch's profiler; what kernel libraries take by themselves is not seen.
    """
    if device.type == "cuda":
        return _cuda_peak(device, work)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would greet on standard error
    with _no_collection(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        result = work()
    del result
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == _MEMORY_EVENT]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@contextmanager
def _no_collection() -> Iterator[None]:
    """What is garbage already must not be released, and counted, meanwhile. To collect it first takes far longer."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _cuda_peak(device: torch.device, work: Callable[[], object]) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = work()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before
