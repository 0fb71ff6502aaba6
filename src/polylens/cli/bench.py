"""`polylens bench`: how fast it is on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from polylens.cli.options import DeviceOption


def bench(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="prefill, decode, throughput, adapters, memory, or all of them: all.")
    ],
    only: Annotated[
        str | None, typer.Option("--only", metavar="PART", help="One question of it; a wrong one lists them.")
    ] = None,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, metavar="N", help="Rounds after the warm-up; medians are told.")
    ] = 5,
    dtype: Annotated[str, typer.Option("--dtype", metavar="DTYPE", help="float32, bfloat16 or float16.")] = "float32",
    device: DeviceOption = "cpu",
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny model and tiny requests: shows that all runs, times mean nothing.")
    ] = False,
) -> None:
    """Measure speed and memory on this machine, on a model with random weights that is built the first time.

    Prints a JSON line for each question. Both sides of a comparison run in turns in this process.
    """
    from polylens.bench.run import BENCHMARKS, run_benchmark
    from polylens.bench.setting import Setting
    from polylens.errors import RequestError

    if dtype not in ("float32", "bfloat16", "float16"):
        raise RequestError(f"--dtype must be float32, bfloat16 or float16, got {dtype!r}")
    if name == "all" and only is not None:
        raise RequestError("--only takes one part of one benchmark, not of all")
    setting = Setting(quick=quick, rounds=rounds, device=device, dtype=dtype)  # type: ignore[arg-type]
    for benchmark in BENCHMARKS if name == "all" else (name,):
        for result in run_benchmark(benchmark, setting, only):
            print(result.to_json(), flush=True)  # at once, also into a file: the next question may take minutes
