"""The main job: base and all adapters, all kinds of request, in one batch, equal to merged models run alone."""

from __future__ import annotations

import random

import pytest

from tests.parity.harness import Bench, mixed, more_questions, questions


@pytest.mark.parametrize("mode", ["factored", "fused", "auto"])
def test_mixed_batch_equals_merged_models(bench: Bench, mode: str) -> None:
    with bench.llm(apply_mode=mode) as llm:
        bench.check(llm, mixed(questions(bench.family)))


def test_one_at_a_time_equals_merged_models(bench: Bench) -> None:
    """The same requests without batch mates: what differs here is not a matter of batching."""
    with bench.llm() as llm:
        for case in mixed(["two", "video", "text"]):
            bench.check(llm, [case])


@pytest.mark.full
@pytest.mark.parametrize("mode", ["factored", "fused", "auto"])
def test_rare_shapes(bench: Bench, mode: str) -> None:
    with bench.llm(apply_mode=mode) as llm:
        bench.check(llm, mixed(more_questions(bench.family)))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_random_batches_under_random_budgets(bench: Bench, seed: int) -> None:
    """Any order, any subset, any budget: chunks of prefill and of encoding, preemption, prefix hits together."""
    rng = random.Random(seed)
    config = {
        "max_step_tokens": rng.choice([17, 48, 130, 2048]),
        "max_running": rng.choice([2, 5, 64]),
        "max_encoder_rows": rng.choice([1, 100, 300, 16384]),
        "page_tokens": rng.choice([4, 16]),
        "vision_cache_bytes": rng.choice([0, 20_000, 1 << 20]),
        "prefix_cache": rng.random() < 0.5,
        "apply_mode": rng.choice(["auto", "factored", "fused"]),
    }
    cases = mixed(bench.questions)
    with bench.llm(**config) as llm:
        for _ in range(3):
            bench.check(llm, rng.sample(cases, 16))
