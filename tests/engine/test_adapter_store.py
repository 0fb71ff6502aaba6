"""The adapter store with made-up files and devices: what is where, who makes room for whom."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from polylens.adapters.load import LoadReport
from polylens.core import Adapter, Delta, Digests
from polylens.engine.adapter_store import AdapterStore
from polylens.engine.sequence import Sequence
from polylens.errors import (
    AdapterConflictError,
    AdapterError,
    AdapterFormatError,
    InternalError,
    UnknownAdapterError,
)
from tests.engine.simulation import SimulatedEngine, answer_alone, make_sequence

BYTES = 100
"""Of one made-up adapter, unless it says otherwise."""


@dataclass
class Files:
    """Contents by path. `x*3` is three times as large. Reading counts, and may be held up or fail."""

    contents: dict[str, str] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    hold: threading.Event | None = None
    broken_device: bool = False

    def read(self, name: str, path: str | Path) -> tuple[Adapter, LoadReport]:
        path = str(path)
        self.reads.append(path)
        content = self.contents.get(path, path)
        if content == "broken":
            raise AdapterFormatError(f"{path} is broken")
        num_bytes = BYTES * int(content.partition("*")[2] or 1)
        digests = Digests("", "", content, "", content)
        deltas = {"layer": Delta("layer", torch.zeros(1, 1), torch.zeros(1, 1), 1.0)}
        adapter = Adapter(name, path, deltas, digests, num_bytes)
        return adapter, LoadReport(name, path, {}, digests, num_bytes)

    def place(self, deltas: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.hold is not None:
            self.hold.wait(10)
        if self.broken_device:
            raise RuntimeError("out of memory")
        return dict(deltas)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A store with room for `room` adapters on the device and `host` in CPU memory, and what asks it."""

    def __init__(self, room: int | None = None, host: int | None = None, **options: Any) -> None:
        self.files, self.clock = Files(), Clock()
        self.store = AdapterStore(
            self.files.read,
            self.files.place,
            device_bytes=None if room is None else room * BYTES,
            host_bytes=None if host is None else host * BYTES,
            clock=self.clock,
            patience_s=1.0,
            **options,
        )

    def sequence(self, name: str | None, **more: Any) -> Sequence:
        lease = self.store.lease(name).read()
        seq = make_sequence(name or "base", [0], adapter=lease.adapter, **more)
        seq.lease = lease
        return seq

    def enter_soon(self, seq: Sequence) -> bool:
        """Ask once, and again after what that set going has come in."""
        if self.store.enter(seq):
            return True
        self.settle()
        return self.store.enter(seq)

    def settle(self) -> None:
        deadline = time.monotonic() + 5
        while any(entry.coming for entry in self.store._held):
            assert time.monotonic() < deadline
            self.store.wait(0.05)

    def on_device(self) -> set[str]:
        return {one.name for one in self.store.overview() if one.on_device}

    def left_nothing(self) -> bool:
        return self.store.resident_bytes() == 0 and self.store.digests_in_use() == (set(), set())

    def on_host(self) -> set[str]:
        return {entry.name for entry in self.store._held if entry.host is not None}


def finish(bench: Bench, seq: Sequence) -> None:
    bench.store.leave(seq)
    assert seq.lease is not None
    seq.lease.release()


def test_without_budgets_everything_loaded_is_on_the_device():
    bench = Bench()
    for name in "abc":
        assert bench.store.load(name, name).changed
    assert bench.on_device() == {"a", "b", "c"}
    assert bench.store.names() == ("a", "b", "c")
    assert bench.store.enter(bench.sequence("a"))
    assert bench.store.enter(bench.sequence(None))


def test_same_content_changes_nothing_other_content_conflicts_and_replaces():
    bench = Bench()
    bench.store.load("a", "one")
    first = bench.store.get("a")
    bench.files.contents["copy"] = "one"
    assert not bench.store.load("a", "copy").changed
    with pytest.raises(AdapterConflictError):
        bench.store.load("a", "two")
    assert bench.store.get("a") is first
    old = bench.sequence("a")
    assert bench.store.load("a", "two", replace=True).changed
    assert bench.store.get("a") is not first
    assert bench.store.enter(old)
    assert bench.store.resident_bytes() == 4 * BYTES  # both, on the device and in CPU memory
    finish(bench, old)
    assert bench.store.resident_bytes() == 2 * BYTES


def test_a_failed_load_leaves_what_was_there():
    bench = Bench(room=1)
    bench.store.load("a", "one")
    bench.files.contents |= {"bad": "broken", "big": "big*2"}
    for path, reason in (("bad", "is broken"), ("big", "needs 200 bytes")):
        with pytest.raises(AdapterError, match=reason):
            bench.store.load("a", path, replace=True)
        assert bench.store.get("a").source == "one"
    bench.files.broken_device = True
    with pytest.raises(AdapterError, match="out of memory"):
        bench.store.load("a", "two", replace=True, prefetch=True)
    assert bench.store.get("a").source == "one"
    bench.store.check_integrity()
    bench.store.unload("a")
    assert bench.store.resident_bytes() == 0
    with pytest.raises(UnknownAdapterError):
        bench.store.lease("nobody")


def test_registering_reads_nothing_until_asked_for():
    bench = Bench(room=2, host=3)
    for index in range(1000):
        bench.store.register(f"n{index}", f"p{index}")
    assert bench.files.reads == []
    assert bench.store.path("n7") == "p7"
    for name in ("n7", "n8", "n9", "n7"):
        seq = bench.sequence(name)
        assert bench.enter_soon(seq)
        finish(bench, seq)
    assert bench.files.reads == ["p7", "p8", "p9"]
    assert bench.on_device() == {"n9", "n7"}
    with pytest.raises(AdapterConflictError):
        bench.store.register("n1", "elsewhere")
    bench.store.check_integrity()


def test_the_longest_unused_leaves_and_cpu_memory_spares_the_disk():
    bench = Bench(room=2, host=2)
    for name in "abcd":
        bench.store.register(name, name)
    for name in "abcb":
        seq = bench.sequence(name)
        assert bench.enter_soon(seq)
        finish(bench, seq)
    assert bench.on_device() == {"b", "c"}
    assert bench.on_host() <= {"b", "c"}
    reads = len(bench.files.reads)
    seq = bench.sequence("a")  # its copy in CPU memory is gone too: it is read again
    assert bench.enter_soon(seq)
    assert len(bench.files.reads) == reads + 1
    assert bench.on_device() == {"b", "a"}
    stats = bench.store.stats()
    assert (stats.num_registered, stats.num_on_device, stats.device_bytes) == (4, 2, 2 * BYTES)
    assert (stats.num_moves_in, stats.num_moves_out) == (4, 2)


def test_what_steps_use_and_what_is_pinned_stays():
    bench = Bench(room=2)
    bench.store.load("pinned", "pinned", pinned=True)
    bench.store.load("used", "used")
    used = bench.sequence("used")
    assert bench.store.enter(used)
    bench.store.register("new", "new")
    new = bench.sequence("new")
    assert not bench.enter_soon(new)
    with pytest.raises(AdapterError, match="pinned or in use"):
        bench.store.prefetch("new")
    with pytest.raises(AdapterError, match="pinned or in use"):
        bench.store.load("other", "other", prefetch=True)
    assert bench.store.names() == ("pinned", "used", "new")
    finish(bench, used)
    assert bench.enter_soon(new)
    assert bench.on_device() == {"pinned", "new"}


def test_prefetched_ones_are_there_before_their_first_request():
    bench = Bench(room=1)
    bench.store.load("a", "a")
    bench.store.load("b", "b")
    assert bench.on_device() == {"a"}
    bench.store.load("c", "c", prefetch=True)
    assert bench.on_device() == {"c"}
    bench.store.prefetch("b")
    assert bench.store.enter(bench.sequence("b"))


def test_a_claim_closes_the_gate_for_others_after_the_patience_only():
    bench = Bench(room=1)
    bench.store.load("a", "a")
    bench.store.register("b", "b")
    running = bench.sequence("a")
    assert bench.store.enter(running)
    waiting = bench.sequence("b")
    assert not bench.store.enter(waiting)
    more = bench.sequence("a")
    assert bench.store.enter(more)
    bench.clock.now = 2
    late = bench.sequence("a")
    assert not bench.store.enter(late)
    finish(bench, running)
    finish(bench, more)
    assert not bench.store.enter(waiting)
    bench.settle()
    # It came in for someone: the other one cannot take its place before it was used.
    assert not bench.store.enter(late)
    assert bench.store.enter(waiting)
    finish(bench, waiting)
    assert bench.enter_soon(late)


def test_a_claim_of_an_aborted_request_is_void():
    bench = Bench(room=1)
    bench.store.load("a", "a")
    bench.store.register("b", "b")
    assert bench.store.enter(bench.sequence("a"))
    waiting = bench.sequence("b")
    assert not bench.store.enter(waiting)
    assert waiting.lease is not None
    waiting.lease.release()
    bench.clock.now = 2
    assert bench.store.enter(bench.sequence("a"))


def test_steps_do_not_wait_for_what_comes_in():
    bench = Bench(room=2)
    bench.store.load("a", "a")
    bench.files.hold = threading.Event()
    bench.store.register("b", "b")
    waiting = bench.sequence("b")
    began = time.monotonic()
    assert not bench.store.enter(waiting)
    assert bench.store.enter(bench.sequence("a"))
    assert time.monotonic() - began < 1
    bench.files.hold.set()
    bench.settle()
    assert bench.store.enter(waiting)


def test_failures_reach_those_who_wait_and_are_not_final():
    bench = Bench(room=1, host=0)
    bench.store.register("a", "a")
    seq = bench.sequence("a")
    bench.files.broken_device = True
    assert not bench.enter_soon(seq)
    ((adapter, error),) = bench.store.take_failures().items()
    assert adapter is seq.adapter
    assert "out of memory" in str(error)
    assert bench.store.take_failures() == {}
    bench.files.broken_device = False
    assert bench.enter_soon(seq)
    bench.store.check_integrity()


def test_an_adapter_whose_prefetch_failed_serves_later_requests():
    bench = Bench(room=1)
    bench.store.register("a", "a")
    bench.files.broken_device = True
    with pytest.raises(AdapterError, match="out of memory"):
        bench.store.prefetch("a")
    with pytest.raises(AdapterError, match="out of memory"):
        bench.store.load("a", "a", pinned=True)
    bench.files.broken_device = False
    assert bench.enter_soon(bench.sequence("a"))
    bench.store.check_integrity()


def test_files_that_changed_are_not_brought_in_under_the_old_name():
    bench = Bench(room=1, host=0)
    bench.store.load("a", "a")
    bench.store.load("b", "b", prefetch=True)
    bench.files.contents["a"] = "another"
    seq = bench.sequence("a")
    assert not bench.enter_soon(seq)
    assert "have changed" in str(bench.store.take_failures()[seq.adapter])  # type: ignore[index]


def test_tensors_away_from_the_device_cannot_be_used():
    bench = Bench(room=1)
    bench.store.load("a", "a")
    bench.store.load("b", "b")
    adapter = bench.store.get("b")
    assert list(adapter.deltas) == ["layer"]
    assert "layer" in adapter.deltas
    with pytest.raises(InternalError, match="not on the device"):
        adapter.deltas["layer"]


def test_unloading_waits_for_the_last_request_and_frees():
    bench = Bench(room=2)
    bench.store.load("a", "a")
    seq = bench.sequence("a")
    assert bench.store.enter(seq)
    unloaded = bench.store.unload("a")
    assert not unloaded.released.done()
    assert not unloaded.released.cancel()
    with pytest.raises(UnknownAdapterError):
        bench.store.lease("a")
    finish(bench, seq)
    assert unloaded.released.result(0) == 2 * BYTES
    assert bench.store.resident_bytes() == 0
    bench.store.register("b", "b")
    assert bench.store.unload("b").released.result(0) == 0
    assert bench.left_nothing()


@pytest.mark.parametrize("seed", range(6))
def test_random_life_with_the_scheduler(seed: int):
    """Requests, loads, replacements and unloads at random, with room for two adapters of six."""
    rng = random.Random(seed)
    bench = Bench(room=2, host=rng.choice((0, 3, None)), shared_memory=rng.random() < 0.5)
    names = "uvwxyz"
    for name in names:
        bench.store.register(name, f"{name}1")
    engine = SimulatedEngine(num_pages=64, max_running=rng.choice((2, 5)), gate=bench.store)
    live: list[Sequence] = []
    for step in range(80):
        bench.clock.now += 0.3
        if rng.random() < 0.7:
            name = rng.choice([None, *bench.store.names()])
            seq = bench.sequence(name, max_tokens=rng.choice((1, 4, 9)))
            engine.scheduler.add(seq)
            live.append(seq)
        if rng.random() < 0.1:
            name = rng.choice(names)
            run_quietly(lambda name=name, step=step: bench.store.load(name, f"{name}{step}", replace=True))
        if rng.random() < 0.1:
            run_quietly(lambda: bench.store.unload(rng.choice(names)))
        if live and rng.random() < 0.1:
            victim = live.pop(rng.randrange(len(live)))
            engine.scheduler.abort(victim)
            assert victim.lease is not None
            victim.lease.release()
        engine.step()
        release_done(engine)
        assert bench.store.take_failures() == {}
        bench.store.check_integrity()
    deadline = time.monotonic() + 20
    while engine.scheduler.has_unfinished():
        assert time.monotonic() < deadline, "requests starve"
        bench.clock.now += 0.3
        if not engine.step().entries:
            bench.store.wait(0.002)
        release_done(engine)
    assert set(live) <= set(engine.done)
    assert all(seq.output_ids == answer_alone(seq) for seq in engine.done)
    bench.settle()
    bench.store.check_integrity()
    for name in bench.store.names():
        bench.store.unload(name)
    assert bench.left_nothing()


def release_done(engine: SimulatedEngine) -> None:
    for seq in engine.done:
        assert seq.lease is not None
        seq.lease.release()


def run_quietly(change: Callable[[], Any]) -> None:
    """A change that the state of things may not allow."""
    with contextlib.suppress(AdapterConflictError, UnknownAdapterError):
        change()


def test_a_stream_for_the_only_resident_adapter_does_not_starve_another():
    bench = Bench(room=1)
    for name in "ab":
        bench.store.register(name, name)
    engine = SimulatedEngine(num_pages=64, max_running=3, gate=bench.store)
    other: Sequence | None = None
    for step in range(400):
        bench.clock.now += 0.1
        if step < 200:
            engine.scheduler.add(bench.sequence("a", max_tokens=6))
        if step == 20:
            other = bench.sequence("b", max_tokens=6)
            engine.scheduler.add(other)
        if not engine.step().entries:
            bench.store.wait(0.002)
        release_done(engine)
        if other in engine.done:
            break
    assert step < 100
    # And the stream comes back.
    done = len(engine.done)
    for _ in range(50):
        bench.clock.now += 0.1
        if not engine.step().entries:
            bench.store.wait(0.002)
    assert len(engine.done) > done + 3
