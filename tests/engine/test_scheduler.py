from __future__ import annotations

import random

import pytest

from polylens.engine.sequence import MediaSpan, SequenceState
from polylens.errors import InternalError, PromptTooLongError
from tests.engine.simulation import SimulatedEngine, answer_alone, make_adapter, make_sequence, random_sequence


def entries(plan):
    return [(entry.seq.request_id, entry.start, entry.stop) for entry in plan.entries]


def add(engine, *sequences):
    for seq in sequences:
        engine.scheduler.add(seq)
    return sequences


def test_decodes_first_then_chunks_in_order_of_arrival():
    engine = SimulatedEngine(num_pages=64, max_step_tokens=10)
    add(engine, make_sequence("a", [0] * 3))
    assert entries(engine.step()) == [("a", 0, 3)]
    add(engine, make_sequence("b", [1] * 12), make_sequence("c", [2] * 5))
    assert entries(engine.step()) == [("a", 3, 4), ("b", 0, 9)]
    assert entries(engine.step()) == [("a", 4, 5), ("b", 9, 12), ("c", 0, 5)]
    assert entries(engine.step()) == [("a", 5, 6), ("b", 12, 13), ("c", 5, 6)]


def test_entries_of_one_adapter_are_neighbours_base_first():
    x, y = make_adapter("x"), make_adapter("y")
    engine = SimulatedEngine(num_pages=64, max_running=8, max_step_tokens=64)
    for index, adapter in enumerate((x, None, y, x, None, y)):
        add(engine, make_sequence(str(index), [index], adapter=adapter))
    assert [name for name, _, _ in entries(engine.step())] == ["1", "4", "0", "3", "2", "5"]


def test_max_running_limits_admission():
    engine = SimulatedEngine(num_pages=64, max_running=2)
    add(engine, *(make_sequence(str(index), [index], max_tokens=2) for index in range(3)))
    assert len(engine.step().entries) == 2
    assert len(engine.step().entries) == 2
    assert entries(engine.step()) == [("2", 0, 1)]


def test_media_of_an_entry_are_cut_to_its_chunk():
    engine = SimulatedEngine(num_pages=64, max_step_tokens=6)
    media = [MediaSpan(2, 3, "k", 0, 0), MediaSpan(5, 6, "k", 0, 3)]
    add(engine, make_sequence("a", [0] * 12, media=media))
    (first,) = engine.step().entries
    assert first.media == (MediaSpan(2, 3, "k", 0, 0), MediaSpan(5, 1, "k", 0, 3))
    (second,) = engine.step().entries
    assert second.media == (MediaSpan(6, 5, "k", 0, 4),)


def test_a_second_prompt_takes_the_first_ones_pages():
    engine = SimulatedEngine(num_pages=64, max_step_tokens=32)
    first, second = make_sequence("a", list(range(9)), max_tokens=1), make_sequence("b", list(range(9)), max_tokens=1)
    add(engine, first)
    engine.run()
    add(engine, second)
    assert entries(engine.step()) == [("b", 8, 9)]
    assert (first.cached_tokens, second.cached_tokens) == (0, 8)


def test_preemption_recomputes_the_last_arrived():
    engine = SimulatedEngine(num_pages=8, page_tokens=2, max_step_tokens=32, prefix_cache=False)
    first, second = make_sequence("a", [0] * 5, max_tokens=9), make_sequence("b", [1] * 5, max_tokens=9)
    add(engine, first, second)
    engine.run()
    assert (first.num_preemptions, second.num_preemptions > 0) == (0, True)
    assert [seq.output_ids for seq in (first, second)] == [answer_alone(first), answer_alone(second)]
    assert engine.allocator.num_free == 8


def test_a_preempted_sequence_keeps_its_tokens_and_its_first_cached_count():
    engine = SimulatedEngine(num_pages=8, page_tokens=2, max_step_tokens=32)
    first, second = make_sequence("a", [0] * 5, max_tokens=9), make_sequence("b", [1] * 5, max_tokens=9)
    add(engine, first, second)
    while not second.num_preemptions:
        engine.step()
    assert second.state is SequenceState.WAITING
    assert second.output_ids == answer_alone(second)[: len(second.output_ids)] != []
    engine.run()
    assert second.cached_tokens == 0
    assert second.output_ids == answer_alone(second)


def test_a_span_is_never_cut_and_waits_for_a_step_with_room():
    engine = SimulatedEngine(num_pages=64, max_step_tokens=8)
    add(engine, make_sequence("a", [0] * 14, spans=[(4, 11)]))
    assert [entries(engine.step()) for _ in range(3)] == [[("a", 0, 4)], [("a", 4, 12)], [("a", 12, 14)]]


def test_a_span_beyond_the_budget_runs_alone_and_decodes_come_next():
    engine = SimulatedEngine(num_pages=64, max_step_tokens=8)
    add(engine, make_sequence("a", [0], max_tokens=20))
    engine.step()
    add(engine, make_sequence("b", [1] * 25, spans=[(0, 12), (12, 24)]))
    assert entries(engine.step()) == [("b", 0, 12)]
    assert entries(engine.step()) == [("a", 1, 2)]
    assert entries(engine.step()) == [("b", 12, 24)]
    assert entries(engine.step()) == [("a", 2, 3), ("b", 24, 25)]


def test_decodes_cannot_keep_a_span_within_the_budget_waiting():
    engine = SimulatedEngine(num_pages=64, max_step_tokens=8)
    add(engine, make_sequence("a", [0], max_tokens=20))
    engine.step()
    add(engine, make_sequence("b", [1] * 9, spans=[(0, 8)]))
    assert entries(engine.step()) == [("b", 0, 8)]


def test_what_cannot_fit_alone_is_refused():
    engine = SimulatedEngine(num_pages=4, page_tokens=4)
    add(engine, make_sequence("fits", [0] * 13, max_tokens=4))
    with pytest.raises(PromptTooLongError, match="need 5 KV pages of 4"):
        add(engine, make_sequence("a", [0] * 13, max_tokens=5))
    assert [seq.request_id for seq in engine.run()] == ["fits"]


def test_abort_in_every_state():
    engine = SimulatedEngine(num_pages=8, max_running=1)
    running, waiting, other = add(engine, *(make_sequence(name, [0] * 3) for name in "abc"))
    plan = engine.scheduler.schedule()
    engine.scheduler.abort(running)
    engine.scheduler.on_computed(plan)
    engine.scheduler.abort(waiting)
    engine.scheduler.abort(waiting)
    engine.scheduler.check_integrity()
    assert engine.run() == [other]
    engine.scheduler.abort(other)
    engine.scheduler.check_integrity()


def test_a_step_that_was_not_computed_comes_again():
    engine = SimulatedEngine()
    add(engine, make_sequence("a", [0] * 20))
    assert entries(engine.scheduler.schedule()) == entries(engine.scheduler.schedule()) == [("a", 0, 12)]
    assert len(engine.run()) == 1


def test_check_integrity_sees_planted_faults():
    def fresh():
        engine = SimulatedEngine()
        add(engine, make_sequence("a", [0] * 5), make_sequence("b", [1] * 5))
        engine.step()
        return engine, *engine.scheduler.running

    engine, first, second = fresh()
    second.page_table[0] = first.page_table[0]
    with pytest.raises(InternalError, match="users"):
        engine.scheduler.check_integrity()
    engine, first, second = fresh()
    engine.scheduler._running.reverse()
    with pytest.raises(InternalError, match="order"):
        engine.scheduler.check_integrity()
    engine, first, second = fresh()
    first.num_computed = 100
    with pytest.raises(InternalError):
        engine.scheduler.check_integrity()


def walk(seed: int, num_steps: int) -> SimulatedEngine:
    """Random arrivals, aborts and failed steps, then run dry; the simulation checks every step."""
    rng = random.Random(seed)
    page_tokens = rng.choice((1, 2, 4, 5))
    engine = SimulatedEngine(
        page_tokens=page_tokens,
        num_pages=rng.choice((60, 90, 200)) // page_tokens,
        max_step_tokens=rng.choice((1, 4, 12, 40)),
        max_running=rng.choice((1, 3, 6, 12)),
        prefix_cache=rng.random() < 0.8,
    )
    adapters = [None, make_adapter("x"), make_adapter("y"), make_adapter("")]
    live, aborted = [], set()
    for step in range(num_steps):
        if rng.random() < 0.6:
            seq = random_sequence(rng, f"{seed}-{step}", adapters)
            try:
                engine.scheduler.add(seq)
                live.append(seq)
            except PromptTooLongError:
                assert seq.num_prompt_tokens + seq.sampling.max_tokens - 1 > engine.num_pages * engine.page_tokens
        if live and rng.random() < 0.05:
            aborted.add(victim := rng.choice(live))
            engine.scheduler.abort(victim)
        if rng.random() < 0.05:
            engine.scheduler.schedule()
            engine.scheduler.check_integrity()
        if engine.scheduler.has_unfinished():
            engine.step()
    engine.run()
    assert {seq for seq in live if seq not in aborted} <= set(engine.done)
    for seq in engine.done:
        assert seq.output_ids == answer_alone(seq)
    assert engine.allocator.num_free + (engine.cache.num_evictable if engine.cache else 0) == engine.num_pages
    return engine


def test_random_walks():
    engines = [walk(seed, num_steps=60) for seed in range(20)]
    # The walks are worth something only if these happened.
    assert sum(engine.num_preemptions for engine in engines) > 10
    assert sum(engine.num_cached_tokens for engine in engines) > 300


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1000, 1060))
def test_long_random_walks(seed):
    walk(seed, num_steps=150)
