"""Requests of every form through the engine: raw prompts, template variables, media settings, salts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polylens import LLM, ChatRequest, SamplingParams, TextRequest
from polylens.core import Completion
from polylens.errors import AbortedError, AdapterError, ModelLoadError, RequestError, ShuttingDownError
from tests.families.adapters import make_adapter
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
    [
        {"dtype": "int8"},
        {"apply_mode": "fast"},
        {"page_tokens": 0},
        {"max_running": 0},
        {"kv_bytes": "1 GiB"},
        {"calibrate": "no"},
        {"adapter_templates": 0},
    ],
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


# ---- types that are wrong


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: SamplingParams(max_tokens="x"), "max_tokens"),  # type: ignore[arg-type]
        (lambda: SamplingParams(temperature="hot"), "temperature"),  # type: ignore[arg-type]
        (lambda: SamplingParams(stop="a"), "stop"),  # type: ignore[arg-type]
        (lambda: SamplingParams(logit_bias=[1]), "logit_bias"),  # type: ignore[arg-type]
        (lambda: SamplingParams(constraint={"kind": "regex"}), "constraint"),  # type: ignore[arg-type]
        (lambda: SamplingParams(repetition_penalty=1e-300), "repetition_penalty"),
        (lambda: ChatRequest(QUESTION, sampling={"max_tokens": 3}), "sampling"),  # type: ignore[arg-type]
        (lambda: ChatRequest(QUESTION, adapter=3), "adapter"),  # type: ignore[arg-type]
        (lambda: ChatRequest(QUESTION, request_id=""), "request_id"),
        (lambda: ChatRequest(QUESTION, chat_template_kwargs=["x"]), "chat_template_kwargs"),  # type: ignore[arg-type]
        (lambda: ChatRequest(QUESTION, mm_processor_kwargs="x"), "mm_processor_kwargs"),  # type: ignore[arg-type]
        (lambda: TextRequest("hi", sampling=None), "sampling"),  # type: ignore[arg-type]
    ],
)
def test_fields_of_another_type_are_named(make: Callable[[], Any], param: str):
    with pytest.raises(RequestError) as caught:
        make()
    assert caught.value.param == param
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate("what is it?"),
        lambda llm: llm.generate(ChatRequest(QUESTION)),
        lambda llm: llm.generate([QUESTION]),
        lambda llm: llm.generate([{"messages": QUESTION}]),
        lambda llm: llm.generate([], on_error="ignore"),
        lambda llm: llm.chat("what is it?"),
        lambda llm: llm.chat(QUESTION, sampling={"max_tokens": 3}),
        lambda llm: llm.chat(QUESTION, sampling=SamplingParams(), adapter=3),
        lambda llm: next(llm.stream(5)),
    ],
)
def test_calls_with_something_else_are_one_line(llm: LLM, call: Callable[[LLM], Any]):
    with pytest.raises(RequestError) as caught:
        call(llm)
    assert "\n" not in str(caught.value)
    llm.check_integrity()


@pytest.mark.parametrize("penalty", [1e-6, 1e6])
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e30])
def test_extreme_penalties_are_answered(llm: LLM, penalty: float, temperature: float):
    sampling = SamplingParams(max_tokens=4, repetition_penalty=penalty, temperature=temperature, ignore_eos=True)
    assert len(answer(llm, ChatRequest(QUESTION, None, sampling)).token_ids) == 4


def test_an_answer_ends_where_the_pages_do(checkpoint: Callable[[str], Path]):
    """Whatever it might have needed: it is not refused for that."""
    with LLM(checkpoint("qwen2_5_vl"), kv_bytes=1 << 16) as llm:
        assert llm.engine.max_model_len < llm.loaded.max_model_len
        sampling = SamplingParams(max_tokens=10**9, ignore_eos=True)
        completion = answer(llm, ChatRequest([{"role": "user", "content": "hi"}], None, sampling))
        assert completion.finish_reason == "length"
        assert completion.usage.prompt_tokens + completion.usage.completion_tokens == llm.engine.max_model_len
        with pytest.raises(RequestError, match="context") as caught:
            llm.generate([TextRequest([1] * llm.engine.max_model_len)])
        assert caught.value.param == "prompt"


# ---- adapters of an LLM


def test_names_that_mean_something_else_are_refused(llm: LLM, tmp_path: Path):
    for name in ("base", "", 3):
        with pytest.raises(AdapterError, match="name"):
            llm.load_adapter(name, tmp_path)  # type: ignore[arg-type]
        with pytest.raises(AdapterError, match="name"):
            llm.registry.register(name, tmp_path)  # type: ignore[arg-type]
    assert llm.adapters == []
    with pytest.raises(AdapterError, match="dict"):
        LLM.from_loaded(llm.loaded, ["a"])  # type: ignore[arg-type]


def test_unloading_frees_memory_and_caches(checkpoint: Callable[[str], Path], tmp_path: Path):
    model = checkpoint("qwen2_5_vl")
    folder = make_adapter(model, tmp_path / "a", targets="all", seed=1)
    with LLM(model, {"a": folder}) as llm:
        llm.generate([ChatRequest(QUESTION, "a", SHORT)])
        assert llm.engine.vision.cache.num_bytes > 0
        assert llm.unload_adapter("a") > llm.load_adapter("b", folder).num_bytes
        assert llm.engine.vision.cache.num_bytes == 0
        # While a stream uses it, all stays; then it goes.
        stream = llm.stream(QUESTION, "b", SamplingParams(max_tokens=8, ignore_eos=True))
        next(stream)
        assert llm.unload_adapter("b") == 0
        assert llm.registry.resident_bytes() > 0
        stream.close()  # type: ignore[attr-defined]
        assert llm.registry.resident_bytes() == llm.engine.vision.cache.num_bytes == 0
        assert llm.engine.prefix_cache is not None
        assert not llm.engine.prefix_cache.kept_pages()
        llm.check_integrity()
