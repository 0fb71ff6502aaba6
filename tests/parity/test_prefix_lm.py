"""PaliGemma: the whole prompt sees itself, so it is computed at once and its cache serves only the same prompt."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polylens.errors import RequestError
from tests.families.media import picture, user
from tests.parity.harness import Bench, Case, mixed


def test_a_prompt_longer_than_a_step_is_one_chunk(bench_of: Callable[[str], Bench]) -> None:
    bench = bench_of("paligemma")
    with bench.llm(max_step_tokens=16) as llm:
        bench.check(llm, mixed(["picture", "two"], ["base", "all"]), num_tokens=3)


def test_cached_prompts_serve_only_equal_ones(bench_of: Callable[[str], Bench]) -> None:
    bench = bench_of("paligemma")
    start = user(picture(32, 24, 1), "what is in the")
    bench.questions |= {"start": start, "longer": user(picture(32, 24, 1), "what is in the picture?")}
    with bench.llm(page_tokens=4) as llm:
        for name in ("start", "longer", "start", "longer"):
            bench.check(llm, [Case(name, "base")], num_tokens=3)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (user("no picture"), "images"),
        ([*user(picture(8, 8), "a"), {"role": "assistant", "content": "b"}, *user("c")], "no earlier answers"),
    ],
)
def test_what_the_family_does_not_take(messages: list, problem: str, bench_of: Callable[[str], Bench]) -> None:
    with bench_of("paligemma").llm() as llm, pytest.raises(RequestError, match=problem):
        llm.chat(messages)


def test_the_prompt_is_the_processors_own(bench_of: Callable[[str], Bench]) -> None:
    bench = bench_of("paligemma")
    system = {"role": "system", "content": "in English"}
    bench.questions["task"] = [system, *user(picture(8, 8), "caption", picture(9, 9), "en")]
    with bench.llm() as llm:
        prompt = llm.loaded.processing.prepare(bench.questions["task"])
        text = llm.loaded.processing.tokenizer.decode(prompt.token_ids)
    assert text == "<image>" * 32 + "<bos>in English\ncaption\nen\n"
