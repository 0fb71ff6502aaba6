"""Check the Triton kernels on this GPU against the reference, then print the benchmarks' table. Under 6 minutes.

    python benchmarks/gpu.py [--device cuda] [--dtype bfloat16] [--rounds 3] [--quick]

First the kernels: every dtype, ragged segments of unequal ranks, against `apply_reference` in float64; the first
difference beyond the rounding of the dtype ends the script with exit code 1. Then every question of `polylens bench`,
a JSON line each, until the time is up. Nobody has run it on a GPU yet: where it fails, please report what it printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator

import torch

from polylens.bench.result import hardware
from polylens.bench.run import BENCHMARKS, run_benchmark
from polylens.bench.setting import Setting
from polylens.core import Delta
from polylens.lora.kernels import choose_factored
from polylens.lora.ops import apply_reference
from polylens.lora.routing import DeltaRows

TIME_S = 330
"""No question is begun after this long; the longest takes some seconds on a GPU."""

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative to the largest output: a few roundings of the dtype."""

SHAPES = ((896, 4864), (4864, 896), (100, 70))
SEGMENTS = (
    ((8, 0, 1),),
    tuple((rank, row, row + 1) for row, rank in enumerate((4, 8, 16, 32, 64, 128, 3, 1))),
    ((33, 0, 20), (1, 20, 23), (64, 30, 200)),
    ((32, 0, 2000), (16, 2000, 3074)),
)
"""(rank, first row, last row + 1) of each segment."""


def check_kernels(device: torch.device) -> Iterator[dict[str, object]]:
    """One line a case: the largest error relative to the largest output, and whether it is within the rounding."""
    generator = torch.Generator().manual_seed(0)
    for dtype, tolerance in TOLERANCES.items():
        apply_factored = choose_factored(device)
        for num_in, num_out in SHAPES:
            for spans in SEGMENTS:
                error = _error(apply_factored, num_in, num_out, spans, dtype, device, generator)
                yield {
                    "kernels": str(dtype).removeprefix("torch."),
                    "in": num_in,
                    "out": num_out,
                    "segments": spans,
                    "error": float(f"{error:.3g}"),
                    "ok": error <= tolerance,
                }


def _error(apply_factored, num_in, num_out, spans, dtype, device, generator) -> float:  # type: ignore[no-untyped-def]
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    num_rows = spans[-1][2] + 1
    x, y = random(num_rows, num_in), random(num_rows, num_out)
    rows = [
        DeltaRows(Delta("layer", random(rank, num_in) / num_in**0.5, random(num_out, rank), 0.7), start, stop)
        for rank, start, stop in spans
    ]
    double = [row._replace(delta=Delta("layer", row.delta.a.double(), row.delta.b.double(), 0.7)) for row in rows]
    expected = apply_reference(x.double(), y.double(), double)
    apply_factored(x, y, rows)
    return float((y.double() - expected).abs().max() / expected.abs().max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tiny model: shows that all runs")
    options = parser.parse_args()
    start = time.monotonic()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu.py: no CUDA device here", file=sys.stderr)
        return 2
    print(json.dumps({"hardware": hardware(options.device, getattr(torch, options.dtype))}), flush=True)
    wrong = 0
    for line in check_kernels(device):
        print(json.dumps(line), flush=True)
        wrong += not line["ok"]
    if wrong:
        print(f"gpu.py: {wrong} kernel checks failed", file=sys.stderr)
        return 1
    setting = Setting(quick=options.quick, rounds=options.rounds, device=options.device, dtype=options.dtype)
    for name, parts in BENCHMARKS.items():
        for part in parts:
            if time.monotonic() - start > TIME_S:
                print(json.dumps({"left out": f"{name} {part}", "because": f"{TIME_S} s are over"}), flush=True)
                continue
            for result in run_benchmark(name, setting, part):
                print(result.to_json(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
