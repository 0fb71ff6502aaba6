"""Many requests at once: how many are answered a second, and how long a token takes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from polylens.bench.sides import Side

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from polylens.bench.result import Result
    from polylens.bench.setting import Setting
    from polylens.core import ChatRequest
    from polylens.engine.llm import LLM
    from polylens.engine.prepare import PreparedRequest

NUM_ADAPTERS = 8


@dataclass
class _Run:
    """What one pass over the requests took."""

    seconds: float = 0.0
    gaps_s: list[float] = field(default_factory=list)


def throughput(setting: Setting) -> Iterator[Result]:
    sizes = setting.sizes
    adapters = setting.adapters(NUM_ADAPTERS)
    names = [list(adapters)[index % NUM_ADAPTERS] for index in range(sizes.throughput_requests)]
    with setting.dynamic(adapters) as dynamic, setting.merged() as merged:
        pairs = [_prepared(setting, dynamic, names), _prepared(setting, merged, [None] * len(names))]
        runs: list[list[_Run]] = [[], []]
        for turn in range(setting.rounds + 1):
            for index, (side, requests) in enumerate(pairs):
                run = _run(side, requests)
                if turn:  # the first round warms up
                    runs[index].append(run)
    what = (
        f"{len(names)} requests with pictures of {sizes.throughput_side} x {sizes.throughput_side}, "
        f"{sizes.throughput_tokens} new tokens each, {NUM_ADAPTERS} adapters"
    )
    ours, theirs = (len(names) / median(run.seconds for run in side) for side in runs)
    our_gap, their_gap = (median(gap for run in side for gap in run.gaps_s) for side in runs)
    yield setting.compare(
        f"throughput, {what}: requests a second, dynamic vs merged", ours, theirs, 0.97, "1/s", smallest=True
    )
    yield setting.compare(
        f"throughput, {what}: median time between tokens, dynamic vs merged", our_gap, their_gap, 1 / 0.97
    )


def _prepared(setting: Setting, llm: LLM, names: Sequence[str | None]) -> tuple[Side, list[PreparedRequest]]:
    side = Side(llm)
    return side, side.prepare([_request(setting, name, seed) for seed, name in enumerate(names)])


def _request(setting: Setting, adapter: str | None, seed: int) -> ChatRequest:
    sizes = setting.sizes
    media = [{"type": "image", "image": setting.picture(sizes.throughput_side, seed)}]
    return setting.request(sizes.throughput_text, adapter, media=media, max_tokens=sizes.throughput_tokens)


def _run(side: Side, requests: Sequence[PreparedRequest]) -> _Run:
    run = _Run()
    start = time.perf_counter()
    side.start(requests)
    last: dict[str, float] = {}
    while side.engine.has_unfinished():
        outputs = side.engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.error is not None:
                raise output.error
            if output.request_id in last:
                run.gaps_s.append(now - last[output.request_id])
            last[output.request_id] = now
    run.seconds = time.perf_counter() - start
    return run
