"""The sides of a comparison, and how they are timed against each other."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from polylens.core import Request
    from polylens.engine.llm import LLM
    from polylens.engine.prepare import PreparedRequest
    from polylens.engine.sequence import Sequence as Running


def alternate(sides: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """Medians of what the sides return (seconds), run in turns after one round of warm-up.

    Every other round goes through the sides backwards, so that a machine that slows down hits them alike.
    """
    taken: list[list[float]] = [[] for _ in sides]
    for turn in range(rounds + 1):
        order = range(len(sides)) if turn % 2 else reversed(range(len(sides)))
        for index in order:
            seconds = sides[index]()
            if turn:
                taken[index].append(seconds)
    return [median(times) for times in taken]


class Side:
    """An engine whose requests are prepared beforehand: their pictures processed, their text tokenised."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.engine

    def prepare(self, requests: Sequence[Request]) -> list[PreparedRequest]:
        # No adapter here has a processor of its own, so none need be read for this.
        return [self.engine.prepare(request, adapter=None) for request in requests]

    def start(self, prepared: Sequence[PreparedRequest]) -> list[Running]:
        """Queue the requests; the sequences that run them."""
        ids = []
        for one in prepared:
            lease = self.engine.registry.lease(one.request.adapter)
            ids.append(self.engine.enqueue(one, lease.read()))
        by_id = {seq.request_id: seq for seq in self.engine.scheduler.waiting}
        return [by_id[request_id] for request_id in ids]

    def step(self) -> None:
        for output in self.engine.step():
            if output.error is not None:
                raise output.error

    def until_done_s(self, prepared: Sequence[PreparedRequest]) -> float:
        """Seconds from queueing the requests to the last token of the last one."""
        start = time.perf_counter()
        self.start(prepared)
        while self.engine.has_unfinished():
            self.step()
        return time.perf_counter() - start

    def decode_step_s(self, prepared: Sequence[PreparedRequest], num_steps: int) -> float:
        """Median seconds of a step in which all the requests decode. They must want `num_steps` + 3 tokens or more."""
        running = self.start(prepared)
        while any(seq.num_remaining > 1 for seq in running):
            self.step()
        self.step()
        times = []
        for _ in range(num_steps):
            start = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - start)
        for seq in running:
            self.engine.abort(seq.request_id)
        return median(times)
