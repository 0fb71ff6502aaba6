"""A random life of an engine: requests join and are aborted, adapters are replaced and unloaded, budgets are small.

Whatever happens, an answer that is finished equals the merged model of the adapter that its request named when
it was added, and in the end nothing is held.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from polylens import LLM, ChatRequest, Completion
from tests.families.build import FAMILIES
from tests.parity.harness import BASE, NUM_TOKENS, RECIPES, Bench, Case, assert_equal, greedy

NAMES = ("first", "second")
"""Adapter names; which of the bench's adapters each stands for changes all the time."""

QUESTIONS = ("picture", "two", "video", "text")
BUDGETS = {
    "max_step_tokens": 60,
    "max_running": 6,
    "max_encoder_rows": 300,
    "page_tokens": 4,
    "vision_cache_bytes": 40_000,
}


@dataclass
class _Life:
    bench: Bench
    llm: LLM
    rng: random.Random
    content: dict[str, str] = field(default_factory=dict)
    asked: dict[str, Case] = field(default_factory=dict)
    answers: dict[str, Completion] = field(default_factory=dict)
    num_aborted: int = 0

    def load(self) -> None:
        name = self.rng.choice(NAMES)
        self.content[name] = self.rng.choice(list(RECIPES))
        self.llm.load_adapter(name, self.bench.adapters[self.content[name]], replace=True)

    def unload(self) -> None:
        if self.content:
            name = self.rng.choice(list(self.content))
            del self.content[name]
            self.llm.unload_adapter(name)

    def ask(self) -> None:
        name = self.rng.choice([None, *self.content])
        case = Case(self.rng.choice(QUESTIONS), self.content[name] if name else BASE)
        request = ChatRequest(self.bench.questions[case.question], name, greedy())
        self.asked[self.llm.engine.add_request(request)] = case

    def abort(self) -> None:
        running = [request_id for request_id in self.asked if request_id not in self.answers]
        if running:
            request_id = self.rng.choice(running)
            self.llm.engine.abort(request_id)
            del self.asked[request_id]
            self.num_aborted += 1

    def step(self) -> None:
        if not self.llm.engine.has_unfinished():
            return
        for output in self.llm.engine.step():
            assert output.error is None
            if output.delta is not None and output.delta.completion is not None:
                self.answers[output.request_id] = output.delta.completion
        self.llm.check_integrity()


def live(bench: Bench, seed: int, num_events: int) -> None:
    rng = random.Random(seed)
    longest = max(bench.num_prompt_tokens(Case(question, BASE)) for question in QUESTIONS)
    config = {**BUDGETS, "kv_bytes": 3 * (longest + NUM_TOKENS) * bench.token_bytes}
    with LLM(bench.checkpoint, **config) as llm:
        life = _Life(bench, llm, rng)
        for _ in range(num_events):
            event = rng.choices([life.step, life.ask, life.load, life.unload, life.abort], weights=[60, 25, 6, 2, 3])[0]
            event()
        while llm.engine.has_unfinished():
            life.step()
        for name in list(life.content):
            llm.unload_adapter(name)
        assert llm.registry.resident_bytes() == 0
    assert life.answers.keys() == life.asked.keys()
    cases = [life.asked[request_id] for request_id in life.answers]
    assert len({case.adapter for case in cases}) > 2
    assert_equal(bench.compare(cases, list(life.answers.values())), cases)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_random_life(family: str, bench_of: Callable[[str], Bench]) -> None:
    live(bench_of(family), seed=1, num_events=120)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("family", FAMILIES)
def test_long_random_lives(family: str, seed: int, bench_of: Callable[[str], Bench]) -> None:
    live(bench_of(family), seed, num_events=600)
