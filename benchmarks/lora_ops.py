"""What does one adapted layer cost beside the same layer with merged weights? JSON lines, one row a case.

`python benchmarks/lora_ops.py [--dtype bfloat16] [--threads 2] [--repeats 20]`. Times are the shortest
of the repeats, interleaved between the ways so that a busy machine hits them alike. `overhead` is
relative to the merged layer; `python_us` cases have a layer so small that only the wrapper is seen.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from polylens.core import Adapter, Component, Delta, Digests, LayerKind, LayerSpec
from polylens.lora.context import RoutingContext
from polylens.lora.cost import Calibration, CostModel, calibrate
from polylens.lora.layers import wrap_layers
from polylens.lora.routing import segments

CASES = (
    # rows, in, out, rank, number of adapters that share the rows evenly
    (3072, 896, 4864, 32, 1),
    (3072, 4864, 896, 32, 1),
    (3072, 896, 896, 32, 1),
    (3072, 896, 4864, 32, 4),
    (512, 896, 4864, 32, 1),
    (128, 896, 4864, 32, 1),
    (8, 896, 4864, 32, 8),
    (8, 896, 4864, 32, 1),
    (1, 896, 4864, 32, 1),
)
WAYS = ("factored", "fused", "auto")


def make_adapters(spec: LayerSpec, rank: int, count: int, dtype: torch.dtype) -> list[Adapter]:
    digests = Digests("", "", "", "", "")
    adapters = []
    for index in range(count):
        a = torch.randn(rank, spec.in_features).to(dtype) * 0.02
        b = torch.randn(spec.out_features, rank).to(dtype) * 0.02
        adapters.append(Adapter(str(index), "bench", {spec.name: Delta(spec.name, a, b, 2.0)}, digests, 0))
    return adapters


def shortest_s(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    best = [float("inf")] * len(runs)
    for repeat in range(repeats + 1):
        for index, run in enumerate(runs):
            start = time.perf_counter()
            run()
            if repeat:  # the first round warms up
                best[index] = min(best[index], time.perf_counter() - start)
    return best


def wrapped(
    way: str,
    rows: int,
    spec: LayerSpec,
    adapters: Sequence[Adapter | None],
    calibration: Calibration,
    dtype: torch.dtype,
) -> tuple[nn.Module, AbstractContextManager[None]]:
    model = nn.Sequential(nn.Linear(spec.in_features, spec.out_features)).to(dtype).requires_grad_(False)
    if way == "merged":
        return model, nullcontext()
    ctx = RoutingContext()
    wrap_layers(model, [spec], ctx, {}, CostModel(way, calibration))  # type: ignore[arg-type]
    share = rows // len(adapters)
    return model, ctx.text(segments([share] * len(adapters), adapters))


def measure(
    case: tuple[int, int, int, int, int], calibration: Calibration, dtype: torch.dtype, repeats: int
) -> Iterator[dict]:
    rows, in_features, out_features, rank, count = case
    spec = LayerSpec("0", Component.LANGUAGE_MODEL, LayerKind.LINEAR, in_features, out_features)
    adapters = make_adapters(spec, rank, count, dtype)
    x = torch.randn(rows, in_features).to(dtype)
    names = ("merged", *WAYS)
    made = [wrapped(way, rows, spec, adapters, calibration, dtype) for way in names]
    for _, context in made:
        context.__enter__()
    times = shortest_s([lambda layer=layer: layer[0](x) for layer, _ in made], repeats)
    for _, context in made:
        context.__exit__(None, None, None)
    chosen = CostModel("auto", calibration).choose(rows // count, in_features, out_features, rank)
    for name, seconds in zip(names, times, strict=True):
        yield {
            "case": {"rows": rows, "in": in_features, "out": out_features, "rank": rank, "adapters": count},
            "dtype": str(dtype).removeprefix("torch."),
            "way": name,
            "ms": round(seconds * 1e3, 4),
            "overhead": round(seconds / times[0] - 1, 4),
            **({"chosen": chosen} if name == "auto" else {}),
        }


def python_cost(repeats: int) -> Iterator[dict]:
    """Microseconds that the wrapper adds to a layer of a few values."""
    spec = LayerSpec("0", Component.LANGUAGE_MODEL, LayerKind.LINEAR, 8, 8)
    other = LayerSpec("other", Component.LANGUAGE_MODEL, LayerKind.LINEAR, 8, 8)
    x = torch.randn(8, 8)
    situations: dict[str, tuple[str, list[Adapter | None]]] = {
        "not wrapped": ("merged", [None]),
        "no adapter in the batch": ("factored", [None]),
        "8 adapters, none on this layer": ("factored", [*make_adapters(other, 4, 8, torch.float32)]),
        "1 adapter factored": ("factored", [*make_adapters(spec, 4, 1, torch.float32)]),
        "8 adapters factored": ("factored", [*make_adapters(spec, 4, 8, torch.float32)]),
        "1 adapter fused": ("fused", [*make_adapters(spec, 4, 1, torch.float32)]),
    }
    for name, (way, adapters) in situations.items():
        model, context = wrapped(way, 8, spec, adapters, Calibration(), torch.float32)
        layer = model[0]  # type: ignore[index]
        with context:
            [seconds] = shortest_s([lambda layer=layer: [layer(x) for _ in range(200)]], repeats)
        yield {"case": "python", "situation": name, "us_per_call": round(seconds / 200 * 1e6, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    with torch.inference_mode():
        start = time.perf_counter()
        calibration = calibrate("cpu", dtype)
        seconds = round(time.perf_counter() - start, 3)
        print(json.dumps({"case": "calibration", "took_s": seconds, **calibration.__dict__}), flush=True)
        for row in python_cost(options.repeats):
            print(json.dumps(row), flush=True)
        for case in CASES:
            for row in measure(case, calibration, dtype, options.repeats):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
