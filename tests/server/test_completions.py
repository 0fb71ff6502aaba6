"""Plain completions and /tokenize, and the constraints in all their spellings."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from polylens import LLM, SamplingParams
from polylens.core import TextRequest
from tests.server.media import QUESTION, ask
from tests.server.process import ServerProcess

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
PROMPTS = ["what is in", "the picture is"]


def test_prompts_as_text_and_as_ids_are_the_same(client: OpenAI, live: ServerProcess, reference: LLM):
    expected = reference.generate([TextRequest(one, "words", SamplingParams(max_tokens=8)) for one in PROMPTS])
    answer = client.completions.create(model="words", prompt=PROMPTS, **GREEDY)
    assert [choice.text for choice in answer.choices] == [one.text for one in expected]  # type: ignore[union-attr]
    ids = [httpx.post(f"{live.url}/tokenize", json={"prompt": one}).json()["tokens"] for one in PROMPTS]
    by_ids = client.completions.create(model="words", prompt=ids, **GREEDY)
    assert [choice.text for choice in by_ids.choices] == [choice.text for choice in answer.choices]
    assert client.completions.create(model="words", prompt=ids[0], **GREEDY).choices[0].text == answer.choices[0].text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, ids))


def test_streams_and_logprobs(client: OpenAI):
    asked: dict[str, Any] = {"model": "eyes", "prompt": PROMPTS, "logprobs": 2, **GREEDY}
    whole = client.completions.create(**asked)
    streamed = ["", ""]
    tokens: list[list[str]] = [[], []]
    for chunk in client.completions.create(stream=True, **asked):
        choice = chunk.choices[0]
        streamed[choice.index] += choice.text
        if choice.logprobs is not None:
            tokens[choice.index] += choice.logprobs.tokens or []
    assert streamed == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices if choice.logprobs]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logit_bias": {"999999999": 1}}, "logit_bias"),
        ({"extra_body": {"mm_processor_kwargs": {"fps": 1}}}, "mm_processor_kwargs"),
    ],
)
def test_what_is_wrong_is_named(client: OpenAI, change: dict[str, Any], param: str):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": "tiny", "prompt": "hi", **GREEDY, **change})
    assert caught.value.param == param, caught.value


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("guided_choice", ["yes", "no"], "yes|no"),
        ("guided_regex", "[0-9]{2}", "[0-9]{2}"),
        ("structured_outputs", {"choice": ["left", "right"]}, "left|right"),
        ("structured_outputs", {"regex": "a{1,3}b"}, "a{1,3}b"),
        ("guided_json", {"type": "boolean"}, "true|false"),
        ("guided_json", '{"type": "boolean"}', "true|false"),
        ("response_format", {"type": "json_object"}, r"(?s)\{.*"),
    ],
)
def test_constraints_hold(client: OpenAI, field: str, value: Any, pattern: str):
    asked: dict[str, Any] = {"model": "words", "messages": ask(QUESTION), "temperature": 0, "max_tokens": 20}
    answer = client.chat.completions.create(**asked, extra_body={field: value})
    assert re.fullmatch(pattern, answer.choices[0].message.content or "")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "("}, None),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"type": "x"}}, None),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
    ],
)
def test_bad_constraints_are_refused(client: OpenAI, fields: dict[str, Any], param: str | None):
    asked: dict[str, Any] = {"model": "tiny", "messages": ask(QUESTION), **GREEDY}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked, extra_body=fields)
    assert param is None or caught.value.param == param


def test_penalties_and_bias_reach_the_sampler(client: OpenAI, live: ServerProcess):
    token = httpx.post(f"{live.url}/tokenize", json={"prompt": "picture"}).json()["tokens"][-1]
    asked: dict[str, Any] = {"model": "tiny", "messages": ask(QUESTION), **GREEDY}
    biased = client.chat.completions.create(**asked, logit_bias={str(token): 100}, logprobs=True)
    assert biased.choices[0].logprobs is not None
    assert len({item.token for item in biased.choices[0].logprobs.content or ()}) == 1
    varied = client.chat.completions.create(
        **asked, presence_penalty=2, frequency_penalty=2, extra_body={"repetition_penalty": 50.0}, logprobs=True
    )
    assert varied.choices[0].logprobs is not None
    # Tokens that are parts of characters all look alike.
    seen = [item.token for item in varied.choices[0].logprobs.content or () if item.bytes is not None]
    assert len(set(seen)) == len(seen)


def test_a_salt_keeps_cached_tokens_apart(client: OpenAI):
    asked: dict[str, Any] = {"model": "tiny", "messages": ask("the picture is in " * 12), **GREEDY}

    def cached(salt: str | None) -> int:
        extra = {} if salt is None else {"cache_salt": salt}
        usage = client.chat.completions.create(**asked, extra_body=extra).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    cached(None)
    assert cached(None) > 0
    assert cached("mine") == 0
    assert cached("mine") > 0
    assert cached("yours") == 0


def test_tokenize(live: ServerProcess):
    def tokenize(status: int = 200, **body: Any) -> dict[str, Any]:
        answer = httpx.post(f"{live.url}/tokenize", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    answer = tokenize(prompt="what is", return_token_strs=True)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] > 0
    chat = tokenize(messages=ask(QUESTION), model="eyes")
    assert chat["count"] > tokenize(messages=ask(QUESTION), add_generation_prompt=False)["count"]
    tokenize(400)
    tokenize(400, prompt="a", messages=ask("b"))
    tokenize(404, prompt="a", model="nobody")
    assert json.dumps(chat)
