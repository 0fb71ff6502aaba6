"""The real `openai` client against a live server process."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from polylens import LLM, ChatRequest, SamplingParams
from tests.families.media import user
from tests.server.media import PICTURE, QUESTION, ask, png_url
from tests.server.process import ServerProcess

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
NAMES = {"tiny": None, "eyes": "eyes", "words": "words"}
"""What requests call a model -> the adapter."""


def expected(reference: LLM, adapter: str | None) -> str:
    sampling = SamplingParams(max_tokens=8)
    return reference.generate([ChatRequest(user(PICTURE, QUESTION), adapter, sampling)])[0].text  # type: ignore[union-attr]


def test_models_are_the_base_and_its_adapters(client: OpenAI):
    cards = {card.id: card for card in client.models.list()}
    assert NAMES.keys() <= cards.keys()
    assert cards["tiny"].parent is None  # type: ignore[attr-defined]
    assert cards["eyes"].parent == "tiny"  # type: ignore[attr-defined]
    assert cards["eyes"].root.endswith("/eyes")  # type: ignore[attr-defined]
    assert client.models.retrieve("eyes").id == "eyes"


def test_every_model_gives_its_own_answer_at_the_same_time(client: OpenAI, reference: LLM):
    def answer(name: str) -> str | None:
        messages: Any = ask(QUESTION, png_url(PICTURE))
        return client.chat.completions.create(model=name, messages=messages, **GREEDY).choices[0].message.content

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(answer, [*NAMES, *NAMES]))
    wanted = [expected(reference, adapter) for adapter in NAMES.values()]
    assert answers == wanted * 2
    assert len(set(wanted)) > 1


def test_an_adapter_of_the_folder_is_read_when_asked_for(client: OpenAI, live: ServerProcess):
    def read() -> bool:
        cards = {card["name"]: card for card in httpx.get(f"{live.url}/stats").json()["adapters"]}
        return cards["lazy"]["bytes"] is not None

    assert not read()
    messages: Any = ask(QUESTION, png_url(PICTURE))
    client.chat.completions.create(model="lazy", messages=messages, **GREEDY)
    assert read()


def test_a_stream_is_the_same_answer_in_pieces(client: OpenAI, reference: LLM):
    messages: Any = ask(QUESTION, png_url(PICTURE))
    stream = client.chat.completions.create(
        model="eyes", messages=messages, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected(reference, "eyes")
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] in ("stop", "length")
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_counts_tokens_and_cached_ones(client: OpenAI, reference: LLM):
    messages: Any = ask("what is in the picture? " * 8, png_url(PICTURE))
    first, again = (client.chat.completions.create(model="words", messages=messages, **GREEDY) for _ in range(2))
    assert first.usage is not None
    assert again.usage is not None
    assert first.usage.prompt_tokens == again.usage.prompt_tokens
    assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) > 0


def test_logprobs_whole_and_streamed_are_the_same(client: OpenAI):
    messages: Any = ask(QUESTION)
    asked: Any = {"model": "tiny", "messages": messages, "logprobs": True, "top_logprobs": 3, **GREEDY}
    whole = client.chat.completions.create(**asked).choices[0].logprobs
    assert whole is not None
    assert whole.content
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in whole.content)
    assert all(token.top_logprobs[0].token == token.token for token in whole.content)
    pieces = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(stream=True, **asked)]
    streamed = [token for piece in pieces if piece is not None for token in piece.content or ()]
    assert [token.token for token in streamed] == [token.token for token in whole.content]


def test_n_answers_with_seeds(client: OpenAI):
    asked: Any = {"model": "tiny", "messages": ask(QUESTION), "n": 3, "temperature": 3.0, "seed": 7, "max_tokens": 8}
    first, again = (client.chat.completions.create(**asked) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) > 1
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(stream=True, **asked):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts
    assert first.usage is not None
    assert first.usage.completion_tokens <= 24


def test_stop_ends_an_answer(client: OpenAI, reference: LLM):
    text = expected(reference, "eyes")
    stop = text[len(text) // 2 :][:2]
    messages: Any = ask(QUESTION, png_url(PICTURE))
    choice = client.chat.completions.create(model="eyes", messages=messages, stop=[stop], **GREEDY).choices[0]
    assert choice.message.content == text[: text.index(stop)]
    assert choice.finish_reason == "stop"


def test_a_json_schema_holds(client: OpenAI):
    schema: Any = {
        "type": "object",
        "properties": {"value": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["value"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="words",
        messages=ask(QUESTION, png_url(PICTURE)),  # type: ignore[arg-type]
        response_format={"type": "json_schema", "json_schema": {"name": "reading", "schema": schema}},
        temperature=0,
        max_tokens=60,
    )
    content = json.loads(answer.choices[0].message.content or "")
    assert list(content) == ["value"]
    assert isinstance(content["value"], int)


def test_several_pictures_in_any_order(client: OpenAI):
    url = png_url(PICTURE)
    content: Any = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "and"},
        {"type": "image_url", "image_url": {"url": url, "detail": "auto"}},
        {"type": "text", "text": QUESTION},
    ]
    answer = client.chat.completions.create(model="eyes", messages=[{"role": "user", "content": content}], **GREEDY)
    assert answer.choices[0].message.content is not None


def test_template_variables_reach_the_prompt(client: OpenAI):
    def num_tokens(**extra: Any) -> int:
        messages: Any = ask(QUESTION, png_url(PICTURE), png_url(PICTURE))
        usage = client.chat.completions.create(model="tiny", messages=messages, extra_body=extra, **GREEDY).usage
        assert usage is not None
        return usage.prompt_tokens

    assert num_tokens(chat_template_kwargs={"add_vision_id": True}) > num_tokens()


def parts(*given: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(given)}]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": ask("hi", "data:image/png;base64,!!")}, "messages[0].content[0]"),
        ({"messages": ask("hi", "https://example.com/a.png")}, "messages[0].content[0]"),
        ({"messages": ask("hi", "file:///etc/passwd")}, "messages[0].content[0]"),
        ({"messages": ask("hi", "/etc/passwd")}, "messages[0].content[0]"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0]"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"extra_body": {"surprise": 1}}, "surprise"),
        ({"extra_body": {"best_of": 4}}, "best_of"),
        ({"extra_body": {"chat_template_kwargs": {"nonsense": 1}}}, "chat_template_kwargs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": parts({"type": "image_url", "image_url": {"url": 1}})}, "messages[0].content[0].image_url.url"),
        ({"messages": parts({"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}})},
         "messages[0].content[0].image_url.detail"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(client: OpenAI, change: dict[str, Any], param: str):
    for stream in (False, True):
        asked: dict[str, Any] = {"model": "tiny", "messages": ask(QUESTION), "stream": stream, **GREEDY, **change}
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**asked)
        assert caught.value.param == param
        assert caught.value.type == "invalid_request_error"


def test_an_unknown_model_is_not_the_base(client: OpenAI):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nobody", messages=ask(QUESTION), **GREEDY)  # type: ignore[arg-type]
    assert caught.value.code == "model_not_found"
    assert "tiny" in str(caught.value)


def test_too_long_a_prompt_is_refused(client: OpenAI):
    with pytest.raises(openai.BadRequestError, match="context"):
        client.chat.completions.create(model="tiny", messages=ask(QUESTION * 5000), **GREEDY)  # type: ignore[arg-type]


def test_fields_without_effect_are_accepted(client: OpenAI):
    extra = {"safety_identifier": "x", "chat_template_kwargs": None, "best_of": 1, "skip_special_tokens": True}
    client.chat.completions.create(
        model="tiny",
        messages=ask(QUESTION),  # type: ignore[arg-type]
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        modalities=["text"],
        extra_body=extra,
        **GREEDY,
    )


def test_live_ready_and_version(live: ServerProcess):
    for path in ("health", "ready", "version", "openapi.json", ""):
        assert httpx.get(f"{live.url}/{path}").status_code == 200
    assert httpx.get(f"{live.url}/nothing").json()["error"]["type"] == "not_found_error"
    assert httpx.get(f"{live.url}/tokenize").status_code == 405


def test_metrics_count(live: ServerProcess, client: OpenAI):
    client.chat.completions.create(model="eyes", messages=ask(QUESTION, png_url(PICTURE)), **GREEDY)  # type: ignore[arg-type]
    text = httpx.get(f"{live.url}/metrics").text
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "queue_time_seconds"):
        assert f'polylens_{name}_count{{adapter="eyes"}}' in text
    assert 'polylens_requests_total{adapter="eyes",status="200"}' in text
    assert "polylens_kv_pages " in text


def test_every_documented_metric_is_there(live: ServerProcess):
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    rows = page.partition("## What to watch")[2].partition("## Under load")[0]
    named = re.findall(r"`(polylens_\w+)", rows)
    text = httpx.get(f"{live.url}/metrics").text
    assert len(named) > 20
    for name in named:
        assert re.search(rf"^# TYPE {name} ", text, re.MULTILINE), name


def test_the_log_has_no_prompts(live: ServerProcess, client: OpenAI):
    client.chat.completions.create(model="tiny", messages=ask("a secret word"), **GREEDY)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=ask("a secret word", "data:secret"), **GREEDY)  # type: ignore[arg-type]
    assert "status=200" in live.log
    assert "secret" not in live.log
