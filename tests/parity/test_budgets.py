"""Small budgets change when things are computed, never what: chunks, preemption and caches give equal answers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from polylens import LLM, ChatRequest, SamplingParams
from polylens.core import Adapter, MediaKind
from polylens.engine.compare import compare
from polylens.engine.vision import EncodeJob, VisionStage
from tests.families.adapters import make_adapter
from tests.families.build import VIDEO_FAMILIES
from tests.families.media import picture, user
from tests.families.reference import merged_reference
from tests.parity.harness import (
    ADAPTERS,
    BASE,
    NUM_TOKENS,
    Bench,
    Case,
    assert_equal,
    greedy,
    mixed,
    reference_completion,
    step,
)

ENCODER_ROWS = 400
"""Holds any item of the questions, and not all pictures of five adapters."""


def test_encoder_chunks_with_different_adapters(bench: Bench, encoder_batches: list[list[EncodeJob]]) -> None:
    cases = mixed(["picture", "two", "video"])
    with bench.llm(max_encoder_rows=ENCODER_ROWS) as llm:
        bench.check(llm, cases)
        assert llm.engine.vision.mixed
    assert len(encoder_batches) >= 3
    adapters_of = [{_name(job.adapter) for job in batch} for batch in encoder_batches]
    assert set().union(*adapters_of) == set(ADAPTERS)
    assert any(len(adapters) > 1 for adapters in adapters_of)
    if bench.family in VIDEO_FAMILIES:
        videos = [batch for batch in encoder_batches if batch[0].item.kind is MediaKind.VIDEO]
        assert len(videos) >= 2
        # A batch holds pictures or videos: the two go through different functions of the model.
        assert all(job.item.kind is MediaKind.VIDEO for batch in videos for job in batch)


def test_every_item_alone_in_its_encoder_batch(bench: Bench, encoder_batches: list[list[EncodeJob]]) -> None:
    with bench.llm(max_encoder_rows=1) as llm:
        bench.check(llm, mixed(["two", "video"]))
    assert all(len(batch) == 1 for batch in encoder_batches)


def test_prefill_chunks_among_decodes(bench: Bench) -> None:
    """Chunks cut prompts, also inside a picture where that is allowed, while earlier requests decode."""
    with bench.llm(max_step_tokens=19, max_running=4) as llm:
        bench.check(llm, mixed(["two", "text", "picture"]))


def test_preempted_requests_are_computed_again(bench: Bench) -> None:
    """A page for each prompt token and few more: answers cannot all grow, so some requests start again."""
    cases = [Case(question, adapter) for question in ("picture", "text") for adapter in ADAPTERS]
    num_tokens = 24
    with bench.llm(**_kv_for(bench, cases, spare_tokens=40), prefix_cache=False, vision_cache_bytes=0) as llm:
        bench.check(llm, cases, num_tokens)
        assert llm.engine.scheduler.num_preemptions > 0


def test_prefix_hits_give_equal_answers(bench: Bench) -> None:
    cases = mixed(["two", "text"])
    with bench.llm(page_tokens=4) as llm:
        first = bench.check(llm, cases)
        second = bench.check(llm, cases)
        assert all(answer.usage.cached_tokens == 0 for answer in first if answer.adapter is None)
        assert all(answer.usage.cached_tokens > 0 for answer in second)


def test_a_prefix_never_hits_for_another_picture_or_adapter(bench: Bench) -> None:
    """Same token ids, another picture of the same size or another adapter: one after the other, all right."""
    other_picture = user(picture(32, 24, 77), "what is in the picture?")
    with bench.llm(page_tokens=4) as llm:
        for adapter in (*ADAPTERS, BASE):
            bench.check(llm, [Case("picture", adapter)])
        after = llm.generate([ChatRequest(other_picture, None, greedy())])
    with LLM(bench.checkpoint, prefix_cache=False, vision_cache_bytes=0) as fresh:
        expected = fresh.generate([ChatRequest(other_picture, None, greedy())])
    assert_equal(compare(after, expected), [Case("other picture", BASE)])
    assert not compare(after, [bench.expected(Case("picture", BASE))]).ok


def test_adapters_with_equal_vision_deltas_share_features(bench: Bench, tmp_path: Path) -> None:
    """The vision cache is keyed by content: base and language-only adapters encode a picture once."""
    adapters = {
        name: make_adapter(bench.checkpoint, tmp_path / name, targets="language", seed=seed)
        for seed, name in enumerate(("one", "other"))
    }
    messages = bench.questions["picture"]
    with LLM(bench.checkpoint, adapters) as llm:
        answers = llm.generate([ChatRequest(messages, name, greedy()) for name in (None, *adapters)])
        assert llm.engine.vision.num_items == 1
    expected = [bench.expected(Case("picture", BASE))]
    for path in adapters.values():
        answer = merged_reference(bench.checkpoint, path, messages, NUM_TOKENS, ignore_eos=True)
        expected.append(reference_completion(*answer))
    assert_equal(compare(answers, expected), [Case("picture", name) for name in (BASE, *adapters)])


def test_stop_tokens_end_answers_alike(bench: Bench) -> None:
    """Answers that stop by themselves: the same tokens, the stop token included, as `generate` gives."""
    cases = mixed(["picture", "text", "tiny"])
    sampling = SamplingParams(max_tokens=40, return_logits=True)
    expected = [
        reference_completion(
            *merged_reference(
                bench.checkpoint, bench.adapters.get(case.adapter), bench.questions[case.question], sampling.max_tokens
            )
        )
        for case in cases
    ]
    with bench.llm() as llm:
        requests = [dataclasses.replace(bench.request(case), sampling=sampling) for case in cases]
        answers = llm.generate(requests)
    assert_equal(compare(answers, expected), cases)


def test_requests_that_join_between_steps(bench: Bench) -> None:
    """Continuous batching: each request is added when the ones before are a step further."""
    cases = mixed(["picture", "text"])
    answers: dict[str, Any] = {}
    with bench.llm() as llm:
        ids = []
        for case in cases:
            ids.append(llm.engine.add_request(bench.request(case)))
            step(llm, answers)
        while llm.engine.has_unfinished():
            step(llm, answers)
        llm.check_integrity()
    assert_equal(bench.compare(cases, [answers[request_id] for request_id in ids]), cases)


@pytest.fixture
def encoder_batches(monkeypatch: pytest.MonkeyPatch) -> list[list[EncodeJob]]:
    """The batches the vision stage runs, in order."""
    batches: list[list[EncodeJob]] = []
    run = VisionStage._run

    def recorded(stage: VisionStage, batch: list[EncodeJob]) -> Any:
        batches.append(batch)
        return run(stage, batch)

    monkeypatch.setattr(VisionStage, "_run", recorded)
    return batches


def _name(adapter: Adapter | None) -> str:
    return adapter.name if adapter else BASE


def _kv_for(bench: Bench, cases: list[Case], spare_tokens: int) -> dict[str, int]:
    """A KV budget for the prompts of `cases` and `spare_tokens` more, in pages of 4 tokens."""
    tokens = sum(bench.num_prompt_tokens(case) for case in cases) + spare_tokens
    return {"kv_bytes": tokens * bench.token_bytes, "page_tokens": 4}
