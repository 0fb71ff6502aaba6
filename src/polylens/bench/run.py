"""The benchmarks by name, and running them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polylens.bench import adapter_cost, decode, memory, prefill, throughput
from polylens.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from polylens.bench.result import Result
    from polylens.bench.setting import Setting

    Question = Callable[[Setting], Iterator[Result]]

BENCHMARKS: Mapping[str, Mapping[str, Question]] = {
    "prefill": {
        "picture": prefill.picture,
        "four-adapters": prefill.four_adapters,
        "sweep": prefill.sweep,
        "video": prefill.video,
        "transformers": prefill.transformers_own,
    },
    "decode": {"short-contexts": decode.short_contexts, "long-contexts": decode.long_contexts},
    "throughput": {"throughput": throughput.throughput},
    "adapters": {
        "shared-picture": adapter_cost.shared_picture,
        "cold-start": adapter_cost.cold_start,
        "many-registered": adapter_cost.many_registered,
    },
    "memory": {"mixed-batch": memory.mixed_batch},
}
"""Questions by the name of their benchmark and their own."""


def run_benchmark(name: str, setting: Setting, only: str | None = None) -> Iterator[Result]:
    """The answers of one benchmark, or of one of its questions. RequestError for a name that is not there."""
    questions = _named(BENCHMARKS, name, "benchmark")
    chosen = questions.values() if only is None else [_named(questions, only, f"part of {name}")]
    for question in chosen:
        yield from question(setting)


def _named(table, name: str, what: str):  # type: ignore[no-untyped-def]
    if name not in table:
        raise RequestError(f"no {what} {name!r}; there are: {', '.join(table)}")
    return table[name]
