"""Factored or fused: which way of adding a delta is cheaper. A pure function of sizes and machine constants."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from polylens.config import ApplyMode
from polylens.disk_cache import DiskCache
from polylens.native.processor import processor_name

Way = Literal["factored", "fused"]


@dataclass(frozen=True)
class Calibration:
    """Machine constants of the cost model. The defaults are those of a 2-core CPU in float32, measured once.

    flops_per_s: of a GEMM whose inner or outer width is a rank (thin, so far below a machine's peak).
    values_per_s: tensor elements read or written per second by an elementwise pass.
    call_s: fixed cost of one more GEMM call (dispatch, and poor use of the machine by small ones).
    """

    flops_per_s: float = 150e9
    values_per_s: float = 10e9
    call_s: float = 5e-6


FUSED_PASSES = 5
"""Passes over a weight's values when fusing: `addmm(out=)` copies W into the scratch (2) and adds BA in
place (2); the segment's GEMM reads the scratch where it would have shared W with the other rows (1)."""


def factored_s(rows: int, in_features: int, out_features: int, rank: int, calibration: Calibration) -> float:
    """Seconds that the factored way adds to the base GEMM: x Aᵀ, then a rank-sized GEMM added into y."""
    flops = 2 * rows * rank * (in_features + out_features)
    values = rows * (in_features + 2 * out_features)
    return flops / calibration.flops_per_s + values / calibration.values_per_s + 2 * calibration.call_s


def fused_s(rows: int, in_features: int, out_features: int, rank: int, calibration: Calibration) -> float:
    """Seconds that the fused way adds: W + sBA into the scratch; its rows' GEMM replaces the base GEMM's share."""
    flops = 2 * rank * in_features * out_features
    values = FUSED_PASSES * in_features * out_features
    return flops / calibration.flops_per_s + values / calibration.values_per_s + 2 * calibration.call_s


@functools.lru_cache(4096)
def choose(rows: int, in_features: int, out_features: int, rank: int, calibration: Calibration) -> Way:
    """The cheaper way for one segment of `rows` rows; remembered, as the layers of a step ask the same."""
    factored = factored_s(rows, in_features, out_features, rank, calibration)
    fused = fused_s(rows, in_features, out_features, rank, calibration)
    return "factored" if factored <= fused else "fused"


@dataclass(frozen=True)
class CostModel:
    """`choose` with its constants, or one forced way ("auto" chooses)."""

    mode: ApplyMode = "auto"
    calibration: Calibration = field(default_factory=Calibration)

    def choose(self, rows: int, in_features: int, out_features: int, rank: int) -> Way:
        if self.mode == "auto":
            return choose(rows, in_features, out_features, rank, self.calibration)
        return self.mode


CALIBRATION_VERSION = 1
"""Raise when `calibrate` measures something else."""


def kept_calibration(device: torch.device, dtype: torch.dtype, cache_dir: Path | None = None) -> Calibration:
    """What `calibrate` found on this machine, measured the first time and then read from disk.

    Another processor, number of threads, dtype or torch is measured anew. cache_dir: where, instead of the default.
    """
    cache = DiskCache("cost", CALIBRATION_VERSION, cache_dir)
    facts = machine_facts(device, dtype)
    found = cache.load(facts, _from_json)
    if found is None:
        found = calibrate(device, dtype)
        cache.store(facts, asdict(found))
    return found


def machine_facts(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What the constants depend on."""
    on_gpu = device.type == "cuda"
    processor = torch.cuda.get_device_name(device) if on_gpu else processor_name()
    return {
        "processor": processor,
        "threads": torch.get_num_threads(),
        "dtype": str(dtype),
        "torch": torch.__version__,
    }


def _from_json(content: Mapping[str, Any]) -> Calibration:
    found = Calibration(**{name: float(value) for name, value in content.items()})
    if not all(value > 0 for value in asdict(found).values()):
        raise ValueError("constants must be positive")
    return found


PROBE_FEATURES = 1024
PROBE_RANK = 32
PROBE_PASS_VALUES = 1 << 22
"""Sizes of the calibration's tensors: out of a core's own caches, yet milliseconds to run."""
PROBE_S = 0.1
"""Time spent on each constant: three of them stay well under half a second."""
PROBE_REPEATS = 30


def calibrate(device: torch.device | str, dtype: torch.dtype) -> Calibration:
    """Measure the constants on this device in this dtype (well under half a second on a CPU)."""
    device = torch.device(device)
    wide = torch.zeros(PROBE_FEATURES, PROBE_FEATURES, dtype=dtype, device=device)
    thin = torch.zeros(PROBE_FEATURES, PROBE_RANK, dtype=dtype, device=device)
    tiny = torch.zeros(1, PROBE_RANK, dtype=dtype, device=device)
    tiny_out = torch.zeros(1, PROBE_RANK, dtype=dtype, device=device)
    square = torch.zeros(PROBE_RANK, PROBE_RANK, dtype=dtype, device=device)
    flat = torch.zeros(PROBE_PASS_VALUES, dtype=dtype, device=device)
    flat_out = torch.zeros_like(flat)
    with torch.no_grad():
        thin_s = _best_s(lambda: torch.mm(wide, thin), device)
        pass_s = _best_s(lambda: flat_out.copy_(flat), device)
        call_s = _best_s(lambda: torch.mm(tiny, square, out=tiny_out), device)
    return Calibration(
        flops_per_s=2 * PROBE_FEATURES * PROBE_FEATURES * PROBE_RANK / thin_s,
        values_per_s=2 * PROBE_PASS_VALUES / pass_s,
        call_s=call_s,
    )


def _best_s(run: Callable[[], object], device: torch.device) -> float:
    """Shortest of several timed runs within `PROBE_S`: other work on the machine only ever adds time."""
    best = float("inf")
    end = time.perf_counter() + PROBE_S
    for repeat in range(PROBE_REPEATS + 1):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        now = time.perf_counter()
        if repeat:  # the first run warms up
            best = min(best, now - start)
            if now > end:
                break
    return max(best, 1e-9)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
