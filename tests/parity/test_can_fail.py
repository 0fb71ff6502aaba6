"""The parity suite is able to fail: adapters and pictures matter, and a swap of either is seen."""

from __future__ import annotations

import pytest

from polylens import LLM, ChatRequest
from tests.families.media import picture, user
from tests.parity.harness import BASE, RECIPES, Bench, Case, greedy

MIN_EFFECT = 1e-2
"""Least a right adapter must move the logits: a hundred times what counts as equal."""


@pytest.mark.parametrize("adapter", RECIPES)
def test_every_adapter_moves_the_logits(bench: Bench, adapter: str) -> None:
    for question in ("picture", "wide", "two", "video"):
        with_it = bench.expected(Case(question, adapter)).logits[0]
        without = bench.expected(Case(question, BASE)).logits[0]
        assert (with_it - without).abs().max() >= MIN_EFFECT, question


def test_swapped_adapters_are_seen(bench: Bench) -> None:
    one, other = "tower", "all"
    swapped = {one: bench.adapters[other], other: bench.adapters[one]}
    cases = [Case("picture", one), Case("picture", other)]
    with LLM(bench.checkpoint, swapped) as llm:
        answers = llm.generate([bench.request(case) for case in cases])
    comparison = bench.compare(cases, answers)
    assert not comparison.ok
    assert len(comparison.differences) == 2
    # Under each other's names both are right.
    assert bench.compare(cases, answers[::-1]).ok


def test_swapped_pictures_are_seen(bench: Bench) -> None:
    swapped = user(picture(48, 24, 4), "and", picture(16, 40, 3), "describe the difference")
    with LLM(bench.checkpoint) as llm:
        answer = llm.generate([ChatRequest(swapped, None, greedy())])
    assert not bench.compare([Case("two", BASE)], answer).ok


def test_base_instead_of_an_adapter_is_seen(bench: Bench) -> None:
    cases = [Case("picture", adapter) for adapter in RECIPES]
    with LLM(bench.checkpoint) as llm:
        answers = llm.generate([bench.request(Case("picture", BASE)) for _ in cases])
    assert len(bench.compare(cases, answers).differences) == len(cases)
