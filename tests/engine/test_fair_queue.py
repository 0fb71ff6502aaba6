from __future__ import annotations

import random
from collections import Counter

import pytest

from polylens.engine.fair_queue import FairQueue
from polylens.engine.sequence import Sequence
from tests.engine.simulation import SimulatedEngine, answer_alone, make_adapter, make_sequence, random_sequence


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


ADAPTERS = {name: make_adapter(name) for name in "abcdefgh"}


def waiting(name: str, adapter: str | None) -> Sequence:
    return make_sequence(name, [0], adapter=ADAPTERS[adapter] if adapter else None, max_tokens=1)


def drained(queue: FairQueue, clock: Clock | None = None, step_s: float = 0.0) -> list[str]:
    order = []
    while len(queue):
        seq = queue.candidates()[0]
        queue.take(seq)
        order.append(seq.request_id)
        if clock is not None:
            clock.now += step_s
    return order


def test_one_adapter_is_first_come_first_served():
    queue = FairQueue()
    for index in range(5):
        queue.add(waiting(str(index), "a"))
    assert drained(queue) == list("01234")


def test_a_crowd_for_one_adapter_waits_for_itself():
    queue = FairQueue()
    for index in range(4):
        queue.add(waiting(f"a{index}", "a"))
    queue.add(waiting("b0", "b"))
    queue.add(waiting("base", None))
    queue.add(waiting("b1", "b"))
    assert drained(queue) == ["a0", "b0", "base", "a1", "b1", "a2", "a3"]


def test_a_line_that_comes_back_joins_the_round_at_its_end():
    queue = FairQueue()
    for name, adapter in (("a0", "a"), ("b0", "b"), ("c0", "c"), ("b1", "b"), ("c1", "c")):
        queue.add(waiting(name, adapter))
    queue.take(queue.candidates()[0])
    queue.add(waiting("a1", "a"))
    assert drained(queue) == ["b0", "c0", "a1", "b1", "c1"]


def test_every_second_turn_is_the_oldest_ones_past_the_age_limit():
    clock = Clock()
    queue = FairQueue(age_limit_s=5, clock=clock)
    for index in range(3):
        queue.add(waiting(f"a{index}", "a"))
    clock.now = 6
    for adapter in "bcd":
        queue.add(waiting(adapter, adapter))
    # a0 in its turn; a1 and a2 because they are old, every second time.
    assert drained(queue) == ["a0", "a1", "b", "a2", "c", "d"]


def test_the_first_that_can_be_admitted_may_be_any_candidate():
    queue = FairQueue()
    for name, adapter in (("a0", "a"), ("b0", "b"), ("b1", "b"), ("c0", "c")):
        queue.add(waiting(name, adapter))
    assert [seq.request_id for seq in queue.candidates()] == ["a0", "b0", "c0"]
    queue.take(queue.candidates()[1])
    assert [seq.request_id for seq in queue.candidates()] == ["a0", "c0", "b1"]


def test_removal():
    queue = FairQueue()
    sequences = [waiting(str(index), "a") for index in range(3)]
    for seq in sequences:
        queue.add(seq)
    queue.remove(sequences[1])
    with pytest.raises(ValueError, match="does not wait"):
        queue.remove(sequences[1])
    assert drained(queue) == ["0", "2"]


def test_nobody_starves_under_a_flood():
    """One adapter is asked for all the time by far more requests than run; seven others now and then."""
    rng, clock = random.Random(0), Clock()
    queue = FairQueue(age_limit_s=50, clock=clock)
    since: dict[Sequence, float] = {}
    waits: dict[str, list[float]] = {name: [] for name in ADAPTERS}
    for step in range(2000):
        clock.now += 1
        wanted = ["a", "a", *(name for name in "bcdefgh" if rng.random() < 0.05)]
        for number, name in enumerate(wanted):
            seq = waiting(f"{step}-{number}", name)
            since[seq] = clock.now
            queue.add(seq)
        taken = queue.candidates()[0]
        queue.take(taken)
        assert taken.adapter is not None
        waits[taken.adapter.name].append(clock.now - since.pop(taken))
    longest = {name: max(times) for name, times in waits.items()}
    # First come, first served would make them wait more than 1000 seconds at the end.
    assert max(longest[name] for name in "bcdefgh") < 100
    assert len(waits["a"]) > 500


def test_turns_in_the_scheduler_go_round_the_adapters():
    engine = SimulatedEngine(num_pages=64, max_running=1)
    for index in range(4):
        engine.scheduler.add(waiting(f"a{index}", "a"))
    engine.scheduler.add(waiting("b0", "b"))
    assert [seq.request_id for seq in engine.run()] == ["a0", "b0", "a1", "a2", "a3"]


class OneAdapterGate:
    """Room for one adapter at a time, which takes `load_steps` asks to come in; the one asked for longest is next."""

    def __init__(self, load_steps: int) -> None:
        self.load_steps = load_steps
        self.resident: str | None = None
        self.users: Counter[str] = Counter()
        self.wanted: str | None = None
        self.asked = 0
        self.switches = 0

    def enter(self, seq: Sequence) -> bool:
        if seq.adapter is None:
            return True
        name = seq.adapter.name
        if name != self.resident:
            self.wanted = self.wanted or name
            if name == self.wanted and not self.users.total():
                self.asked += 1
                if self.asked >= self.load_steps:
                    self.resident, self.wanted, self.asked = name, None, 0
                    self.switches += 1
        if name != self.resident or self.wanted is not None:
            return False
        self.users[name] += 1
        return True

    def leave(self, seq: Sequence) -> None:
        if seq.adapter is not None:
            assert self.users[seq.adapter.name] > 0
            self.users[seq.adapter.name] -= 1


@pytest.mark.parametrize("seed", range(12))
def test_random_walks_with_room_for_one_adapter(seed: int):
    rng = random.Random(seed)
    gate = OneAdapterGate(load_steps=rng.choice((1, 3)))
    engine = SimulatedEngine(num_pages=rng.choice((24, 60)), max_running=rng.choice((1, 3, 6)), gate=gate)
    adapters = [None, *(ADAPTERS[name] for name in "abc")]
    live = []
    for step in range(60):
        if rng.random() < 0.6:
            seq = random_sequence(rng, f"{seed}-{step}", adapters)
            if seq.num_prompt_tokens + seq.sampling.max_tokens <= engine.num_pages * engine.page_tokens:
                engine.scheduler.add(seq)
                live.append(seq)
        if live and rng.random() < 0.1:
            engine.scheduler.abort(live.pop(rng.randrange(len(live))))
        used = {seq.adapter.name for seq in engine.scheduler.running if seq.adapter is not None}
        assert used <= {gate.resident}
        engine.step()
    engine.run()
    assert set(live) <= set(engine.done)
    assert all(seq.output_ids == answer_alone(seq) for seq in engine.done)
    assert gate.users.total() == 0


def test_a_stream_for_the_resident_adapter_does_not_keep_another_out():
    gate = OneAdapterGate(load_steps=2)
    engine = SimulatedEngine(num_pages=64, max_running=2, gate=gate)
    other = make_sequence("other", [0] * 4, adapter=ADAPTERS["b"])
    for step in range(60):
        engine.scheduler.add(make_sequence(f"a{step}", [0] * 4, adapter=ADAPTERS["a"]))
        if step == 5:
            engine.scheduler.add(other)
        engine.step()
    assert other in engine.done
    assert engine.done.index(other) < 15
    assert gate.switches >= 3
