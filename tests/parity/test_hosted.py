"""Models that transformers generates for: adapters on all parts, equal to merged models, behind the same API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polylens import LLM, ChatRequest, SamplingParams, TextRequest
from polylens.core import Constraint, FinishReason
from polylens.engine.stats import collect
from polylens.errors import RequestError
from tests.families.host import HOSTED
from tests.families.media import picture, user
from tests.parity.harness import ADAPTERS, BASE, Bench, Case, greedy, questions

QUESTIONS = {
    "mllama": ("picture", "wide", "two", "video", "text", "turns"),
    "florence2": ("picture", "wide", "text", "task", "place"),
    "apertus1p5": ("picture", "two", "text"),
    "blip": ("picture", "wide"),
    "git": ("picture", "wide", "text"),
    "idefics": ("picture", "two", "text", "turns"),
    "kosmos-2.5": ("picture",),
    "pix2struct": ("picture", "wide"),
    "pp_formulanet": ("no text",),
    "vision-encoder-decoder": ("picture", "donut"),
}
SLOW = ("kosmos-2.5",)
"""Families whose processor makes 4096 patches of any picture."""
OTHERS = {
    "donut": user(picture(32, 24, 73), "<s_question>what?</s_question><s_answer>"),
    "no text": user(picture(32, 24, 74)),
}
FLORENCE_TASKS = {
    "task": user(picture(32, 24, 71), "<CAPTION>"),
    "place": user(picture(32, 24, 72), "<REGION_TO_CATEGORY><loc_1><loc_2><loc_7><loc_9>"),
}


@pytest.fixture(params=sorted(QUESTIONS))
def bench(request: pytest.FixtureRequest, bench_of: Callable[[str], Bench]) -> Bench:
    bench = bench_of(request.param)
    bench.questions.update(FLORENCE_TASKS | OTHERS)
    return bench


@pytest.fixture
def mllama(bench_of: Callable[[str], Bench]) -> Iterator[LLM]:
    with bench_of("mllama").llm() as llm:
        yield llm


@pytest.mark.parametrize("mode", ["auto", pytest.param("factored", marks=pytest.mark.full), "fused"])
def test_answers_equal_merged_models(bench: Bench, mode: str) -> None:
    with bench.llm(apply_mode=mode) as llm:
        assert llm.loaded.is_hosted
        adapters = ADAPTERS if mode == "auto" and bench.family not in SLOW else (BASE, "all")
        bench.check(llm, bench.mixed(QUESTIONS[bench.family], adapters), num_tokens=5)


@pytest.mark.parametrize("family", sorted(set(HOSTED) - set(QUESTIONS)))
def test_further_families_equal_merged_models(family: str, bench_of: Callable[[str], Bench]) -> None:
    bench = bench_of(family)
    with bench.llm() as llm:
        assert llm.loaded.is_hosted
        asked = [name for name in ("picture", "two", "text") if name in questions(family)]
        bench.check(llm, bench.mixed(asked, (BASE, "tower", "all")), num_tokens=4)


@pytest.mark.parametrize("adapter", ["tower", "connector", "all"])
def test_every_adapter_moves_the_logits(bench: Bench, adapter: str) -> None:
    question = QUESTIONS[bench.family][0]
    if not bench.having(adapter):
        pytest.skip("the family has no such part")
    moved = bench.expected(Case(question, adapter), 5).logits[0]
    assert (moved - bench.expected(Case(question, BASE), 5).logits[0]).abs().max() > 1e-2


def test_streams_take_turns_and_give_the_whole_answer(mllama: LLM) -> None:
    question = user(picture(32, 24, 1), "what is it?")
    whole = mllama.chat(question, "all", SamplingParams(max_tokens=6, ignore_eos=True))
    one = mllama.stream(question, "all", SamplingParams(max_tokens=6, ignore_eos=True))
    other = mllama.stream(user("no picture"), None, SamplingParams(max_tokens=3, ignore_eos=True))
    first, rest = next(one), list(other)
    pieces = [first, *one]
    assert [token for piece in pieces for token in piece.token_ids] == list(whole.token_ids)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert rest[-1].completion is not None


def test_an_abandoned_answer_lets_the_next_one_through(mllama: LLM) -> None:
    stream = mllama.stream(user(picture(32, 24, 1), "what is it?"), "tower")
    next(stream)
    stream.close()
    assert (
        mllama.chat(user("hello"), sampling=SamplingParams(max_tokens=2, ignore_eos=True)).usage.completion_tokens == 2
    )
    mllama.check_integrity()


def test_what_a_request_asks_of_its_answer_holds(mllama: LLM) -> None:
    question = user(picture(32, 24, 1), "what is it?")
    choices = SamplingParams(constraint=Constraint("choice", ("gauge", "dial")), max_tokens=20)
    assert mllama.chat(question, "all", choices).text in {"gauge", "dial"}
    drawn = SamplingParams(max_tokens=6, temperature=1.5, seed=3, top_k=5, ignore_eos=True)
    assert mllama.chat(question, "all", drawn).token_ids == mllama.chat(question, "all", drawn).token_ids
    scored = mllama.chat(question, None, SamplingParams(max_tokens=2, logprobs=3, ignore_eos=True))
    assert scored.logprobs is not None
    assert [len(one.top) for one in scored.logprobs] == [3, 3]
    stopped = mllama.chat(question, None, SamplingParams(max_tokens=9, stop_token_ids=(scored.token_ids[1],)))
    assert (stopped.finish_reason, stopped.usage.completion_tokens) == (FinishReason.STOP, 2)


def test_one_answer_is_computed_at_a_time(mllama: LLM) -> None:
    engine = mllama.engine
    for adapter in ("tower", None, "all"):
        engine.add_request(ChatRequest(user("hello"), adapter, greedy(2)))
    engine.step()
    stats = collect(engine)
    assert (sum(stats.running.values()), sum(stats.waiting.values())) == (1, 2)
    while engine.has_unfinished():
        engine.step()
    engine.check_integrity()
    assert collect(engine).generated_tokens_total == 6


def test_raw_text_goes_on(mllama: LLM, bench_of: Callable[[str], Bench]) -> None:
    (answer,) = mllama.generate([TextRequest("the gauge reads", None, greedy(3))])
    assert not isinstance(answer, Exception)
    assert answer.usage.completion_tokens == 3


def test_what_the_model_cannot_compute_ends_its_request_alone(mllama: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    real = mllama.loaded.model.forward

    def forward(*args: Any, **inputs: Any) -> Any:
        if inputs.get("pixel_values") is not None:
            raise ValueError("pictures are too much today")
        return real(*args, **inputs)

    monkeypatch.setattr(mllama.loaded.model, "forward", forward)
    asked = [ChatRequest(user(picture(16, 16), "what?"), "all", greedy(2)), ChatRequest(user("hello"), None, greedy(2))]
    wrong, right = mllama.generate(asked, on_error="return")
    assert isinstance(wrong, RequestError)
    assert "too much today" in str(wrong)
    assert not isinstance(right, Exception)
    mllama.check_integrity()


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        (user(picture(16, 16), picture(16, 16, 1), "<CAPTION>"), "placeholders do not match"),
        ([*user("<CAPTION>"), {"role": "assistant", "content": "a gauge"}], "one user message"),
        (user(picture(16, 16), "<CAPTION> please"), "should be the only content"),
    ],
)
def test_florence_refuses_what_its_processor_has_no_place_for(
    messages: Any, match: str, checkpoint: Callable[[str], Path]
) -> None:
    with LLM(checkpoint("florence2")) as llm, pytest.raises(RequestError, match=match):
        llm.chat(messages)


def test_a_typed_control_token_stays_text(checkpoint: Callable[[str], Path]) -> None:
    with LLM(checkpoint("florence2")) as llm:
        prepare = llm.loaded.processing.prepare
        typed = prepare(user("a<image></s>b")).token_ids
        image = llm.loaded.processing.tokenizer.convert_tokens_to_ids("<image>")
        assert image not in typed
        assert len(prepare(user("<loc_3>")).token_ids) == 1
