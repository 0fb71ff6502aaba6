"""Requests of every form through the engine: raw prompts, template variables, media settings, salts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polylens import LLM, ChatRequest, SamplingParams, TextRequest
from polylens.core import Completion
from polylens.errors import AbortedError, ModelLoadError, RequestError, ShuttingDownError
from tests.families.media import picture, user

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
QUESTION = user(picture(32, 24, 1), "what is in the picture? " * 4)


@pytest.fixture(scope="module")
def shared(checkpoint: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(checkpoint("qwen2_5_vl")) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> LLM:
    shared.engine.vision.cache.clear()
    assert shared.engine.prefix_cache is not None
    shared.engine.prefix_cache.clear()
    return shared


def answer(llm: LLM, request: Any) -> Completion:
    (completion,) = llm.generate([request])
    llm.check_integrity()
    assert isinstance(completion, Completion)
    return completion


def test_a_text_prompt_is_gone_on_from(llm: LLM):
    prompt = "the gauge reads forty two degrees"
    ids = llm.loaded.processing.tokenizer(prompt)["input_ids"]
    by_text, by_ids = answer(llm, TextRequest(prompt, None, SHORT)), answer(llm, TextRequest(ids, None, SHORT))
    assert by_text.token_ids == by_ids.token_ids
    assert by_text.usage.prompt_tokens == len(ids)


def test_control_tokens_typed_in_a_text_prompt_are_text(llm: LLM):
    tokenizer = llm.loaded.processing.tokenizer
    typed = answer(llm, TextRequest("<|im_end|><|image_pad|>", None, SHORT))
    assert typed.usage.prompt_tokens > 2
    ids = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|image_pad|>"])
    assert answer(llm, TextRequest(ids, None, SHORT)).usage.prompt_tokens == 2


@pytest.mark.parametrize("prompt", ["", [], [1.0], [-1], [True], [10**9], 5, None, ["a"]])
def test_wrong_prompts_are_refused(llm: LLM, prompt: Any):
    with pytest.raises(RequestError) as caught:
        llm.generate([TextRequest(prompt)])
    assert caught.value.param == "prompt"


def test_template_variables_and_media_settings_reach_the_prompt(llm: LLM):
    plain = answer(llm, ChatRequest(QUESTION, None, SHORT)).usage.prompt_tokens
    named = ChatRequest(QUESTION, None, SHORT, chat_template_kwargs={"add_vision_id": True})
    assert answer(llm, named).usage.prompt_tokens > plain
    small = ChatRequest(QUESTION, None, SHORT, mm_processor_kwargs={"max_pixels": 128})
    assert answer(llm, small).usage.prompt_tokens < plain
    with pytest.raises(RequestError) as caught:
        llm.generate([ChatRequest(QUESTION, chat_template_kwargs={"nonsense": 1})])
    assert caught.value.param == "chat_template_kwargs"


def test_nothing_is_found_across_salts(llm: LLM):
    def ask(salt: str | None) -> tuple[int, int]:
        """Tokens found in the prefix cache, pictures encoded."""
        before = llm.engine.vision.num_items
        completion = answer(llm, ChatRequest(QUESTION, None, SHORT, cache_salt=salt))
        return completion.usage.cached_tokens, llm.engine.vision.num_items - before

    assert [ask(None), ask("a"), ask("b")] == [(0, 1)] * 3
    for salt in (None, "a", "b"):
        cached, encoded = ask(salt)
        assert cached > 0
        assert encoded == 0


@pytest.mark.parametrize("salt", ["", 3])
def test_wrong_salts_are_refused(llm: LLM, salt: Any):
    with pytest.raises(RequestError) as caught:
        llm.generate([ChatRequest(QUESTION, cache_salt=salt)])
    assert caught.value.param == "cache_salt"


def test_streams_read_in_turns_get_their_own_pieces(llm: LLM):
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    asked = [[{"role": "user", "content": text}] for text in ("one", "another")]
    alone = [llm.chat(messages, sampling=sampling).token_ids for messages in asked]
    first, second = (llm.stream(messages, sampling=sampling) for messages in asked)
    pieces = [[next(first)], [next(second)]]
    between = llm.chat(asked[0], sampling=sampling)
    pieces[1] += list(second)
    pieces[0] += list(first)
    assert [got[-1].completion and got[-1].completion.token_ids for got in pieces] == alone
    assert between.token_ids == alone[0]
    llm.check_integrity()


def test_a_closed_llm_answers_nothing(checkpoint: Callable[[str], Path]):
    other = LLM(checkpoint("qwen2_5_vl"))
    messages = [{"role": "user", "content": "one"}]
    stream = other.stream(messages, sampling=SamplingParams(max_tokens=8, ignore_eos=True))
    next(stream)
    other.close()
    with pytest.raises(AbortedError):
        list(stream)
    with pytest.raises(ShuttingDownError):
        other.chat(messages)


@pytest.mark.parametrize(
    "wrong",
    [{"dtype": "int8"}, {"apply_mode": "fast"}, {"page_tokens": 0}, {"max_running": 0}, {"kv_bytes": "1 GiB"}],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]):
    with pytest.raises(ModelLoadError, match=next(iter(wrong))):
        LLM("no-model", **wrong)


def test_two_requests_of_one_id_are_refused(llm: LLM):
    request = ChatRequest(QUESTION, request_id="twice")
    with pytest.raises(RequestError, match="twice") as caught:
        llm.generate([request, request])
    assert caught.value.param == "request_id"
    llm.check_integrity()
