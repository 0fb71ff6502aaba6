"""Text models whose layers carry a state: chunks continue it, preemption starts it anew, it ends with its request."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from polylens import LLM
from polylens.engine.stats import collect
from polylens.engine.thread import EngineThread
from polylens.errors import InternalError, ModelLoadError
from polylens.models.recurrent import CarriedState
from tests.families.build import ALL_FAMILIES
from tests.parity.harness import ADAPTERS, Bench, Case, assert_equal, mixed, step

RECURRENT = tuple(name for name in ("lfm2_vl", "minicpmv4_6", "qwen3_5", "qwen3_5_moe") if name in ALL_FAMILIES)
"""Families with linear attention or short convolutions in the text model."""
FEW = ("base", "tower", "all")


@pytest.fixture(params=[pytest.param(name, marks=() if name == "qwen3_5" else pytest.mark.full) for name in RECURRENT])
def bench(request: pytest.FixtureRequest, bench_of: Callable[[str], Bench]) -> Bench:
    return bench_of(request.param)


def test_chunks_continue_the_state_among_decodes(bench: Bench) -> None:
    """Chunks of down to one token, also inside a picture, while earlier requests decode."""
    with bench.llm(max_step_tokens=19, max_running=4) as llm:
        bench.check(llm, mixed(["two", "text", "video"], FEW))


@pytest.mark.parametrize("step_tokens", [1, 2, 3])
def test_chunks_shorter_than_the_convolution(bench: Bench, step_tokens: int) -> None:
    with bench.llm(max_step_tokens=step_tokens) as llm:
        bench.check(llm, mixed(["text"], ["base", "all"]), num_tokens=4)


def test_preempted_requests_start_their_state_anew(bench: Bench) -> None:
    cases = [Case(question, adapter) for question in ("picture", "text") for adapter in ADAPTERS]
    num_tokens = 24
    with bench.llm(**_kv_for(bench, cases, spare_tokens=40), vision_cache_bytes=0) as llm:
        bench.check(llm, cases, num_tokens)
        assert llm.engine.scheduler.num_preemptions > 0
        assert collect(llm.engine).carried_state_bytes == 0


def test_an_aborted_request_gives_up_its_state_and_the_others_go_on(bench: Bench) -> None:
    cases = mixed(["picture", "text"], FEW)
    with bench.llm() as llm:
        engine = llm.engine
        ids = [engine.add_request(bench.request(case)) for case in cases]
        answers: dict[str, Any] = {}
        for _ in range(3):
            step(llm, answers)
        states = {seq.request_id: seq.carried for seq in engine.scheduler.running}
        assert collect(engine).carried_state_bytes == sum(state.num_bytes for state in states.values()) > 0
        assert all(state.num_bytes == engine.state_bytes for state in states.values())
        aborted = weakref.ref(states.pop(ids[1]))
        states.clear()
        engine.abort(ids[1])
        gc.collect()
        assert aborted() is None
        assert collect(engine).carried_state_bytes == engine.state_bytes * (len(cases) - 1)
        llm.check_integrity()
        while engine.has_unfinished():
            step(llm, answers)
        assert collect(engine).carried_state_bytes == 0
    rest = [index for index in range(len(cases)) if index != 1]
    assert_equal(bench.compare([cases[i] for i in rest], [answers[ids[i]] for i in rest]), [cases[i] for i in rest])


def test_a_repeated_prompt_is_computed_again(bench: Bench) -> None:
    """Pages without the state that goes with them are of no use."""
    cases = mixed(["picture", "text"], ["base", "all"])
    with bench.llm(page_tokens=4) as llm:
        assert llm.engine.prefix_cache is None
        for _ in range(2):
            answers = bench.check(llm, cases)
            assert all(answer.usage.cached_tokens == 0 for answer in answers)


def test_several_answers_to_one_request_do_not_share_a_state(bench: Bench) -> None:
    case = Case("picture", "all")
    request = bench.request(case)

    async def main(thread: EngineThread) -> list[Any]:
        handles = thread.submit_copies(request, 3)
        return await asyncio.gather(*(handle.completion() for handle in handles))

    with bench.llm() as llm:
        thread = EngineThread(llm.engine).start()
        answers = asyncio.run(main(thread))
        thread.stop()
    assert_equal(bench.compare([case] * 3, answers), [case] * 3)


def test_states_have_their_part_of_the_memory(bench: Bench) -> None:
    with LLM(bench.checkpoint) as llm:
        state_bytes = llm.engine.state_bytes
    least = max(2 * state_bytes, state_bytes + 16 * bench.token_bytes)
    with pytest.raises(ModelLoadError, match=rf"its state {state_bytes}; give at least {least}"):
        bench.llm(kv_bytes=state_bytes)
    with bench.llm(kv_bytes=100 * 4 * bench.token_bytes, page_tokens=4) as llm:
        affordable = 50 * 4 * bench.token_bytes // state_bytes
        assert llm.engine.max_running == min(affordable, llm.engine.config.max_running)
        bench.check(llm, mixed(["text"], FEW))


def test_the_state_of_a_failed_step_is_not_used_again() -> None:
    state = CarriedState.__new__(CarriedState)
    state.num_tokens = 3
    with pytest.raises(ZeroDivisionError), state.advanced(3, 4):
        raise ZeroDivisionError
    with pytest.raises(InternalError, match="None tokens cannot go on at token 3"), state.advanced(3, 4):
        pass


def _kv_for(bench: Bench, cases: list[Case], spare_tokens: int) -> dict[str, int]:
    """A KV budget for the prompts of `cases`, `spare_tokens` more and all states, in pages of 4 tokens."""
    tokens = sum(bench.num_prompt_tokens(case) for case in cases) + spare_tokens
    with LLM(bench.checkpoint) as llm:
        states = len(cases) * llm.engine.state_bytes
    assert states < tokens * bench.token_bytes
    return {"kv_bytes": tokens * bench.token_bytes + states, "page_tokens": 4, "max_running": len(cases)}
