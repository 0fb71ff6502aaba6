"""Every field of a request body is honoured, neutral, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from polylens.cli.chat_body import chat_request, completion_body, sampling_params
from polylens.core import Completion, FinishReason, SamplingParams, TokenLogprob, Usage
from polylens.errors import RequestError, UnknownAdapterError


def request(body: dict[str, Any]):
    body = {"model": "gauges", "messages": [{"role": "user", "content": "hi"}], **body}
    return chat_request(body, {"gauges"}, ("base", "./model"), lambda kind, url: (kind, url))


def test_a_plain_body_is_greedy():
    made = request({})
    assert made.adapter == "gauges"
    assert made.sampling == SamplingParams()
    assert made.messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("model", ["base", "./model"])
def test_the_base_model_has_two_names(model: str):
    assert request({"model": model}).adapter is None


@pytest.mark.parametrize("model", ["gauge", "", "GAUGES"])
def test_an_unknown_model_never_falls_back_to_the_base(model: str):
    with pytest.raises(UnknownAdapterError, match="unknown adapter"):
        request({"model": model})


def test_a_missing_model_is_an_error():
    with pytest.raises(RequestError, match="'model' is missing"):
        request({"model": None})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 5}, SamplingParams(max_tokens=5)),
        ({"max_completion_tokens": 5}, SamplingParams(max_tokens=5)),
        ({"max_tokens": 5, "max_completion_tokens": 5}, SamplingParams(max_tokens=5)),
        ({"temperature": 1, "top_p": 0.5, "seed": 3}, SamplingParams(temperature=1.0, top_p=0.5, seed=3)),
        ({"top_k": 4, "min_p": 0.1}, SamplingParams(top_k=4, min_p=0.1)),
        ({"stop": "a"}, SamplingParams(stop=("a",))),
        ({"stop": ["a", "b"]}, SamplingParams(stop=("a", "b"))),
        ({"stop_token_ids": [1, 2]}, SamplingParams(stop_token_ids=(1, 2))),
        ({"logprobs": True}, SamplingParams(logprobs=0)),
        ({"logprobs": True, "top_logprobs": 2}, SamplingParams(logprobs=2)),
        ({"logprobs": False}, SamplingParams()),
        ({"ignore_eos": True}, SamplingParams(ignore_eos=True)),
        ({"temperature": None, "stop": None, "seed": None}, SamplingParams()),
    ],
)
def test_fields_are_honoured(fields: dict[str, Any], expected: SamplingParams):
    assert sampling_params(fields) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "stream": False, "frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "auto", "store": False},
        {"user": "someone", "metadata": {"a": "b"}, "service_tier": "auto"},
        {"reasoning_effort": None, "something_new": None},
    ],
)
def test_fields_that_ask_for_nothing_are_taken(fields: dict[str, Any]):
    assert request(fields).sampling == SamplingParams()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("stream", True),
        ("frequency_penalty", 0.5),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function"}]),
        ("reasoning_effort", "low"),
        ("repetition_penalty", 1.1),
        ("beam_width", 4),
    ],
)
def test_fields_that_would_change_the_answer_are_refused_by_name(field: str, value: Any):
    with pytest.raises(RequestError, match=f"'{field}' is not supported") as caught:
        request({field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("temperature", 10**400),  # as JSON: 401 digits, more than a float can hold
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1),
        ("seed", 1.0),
        ("stop", ""),
        ("stop", [1]),
        ("stop_token_ids", [-1]),
        ("logprobs", 1),
        ("top_logprobs", 1),
        ("ignore_eos", "yes"),
    ],
)
def test_wrong_values_are_refused_by_name(field: str, value: Any):
    with pytest.raises(RequestError, match=f"'{field}'") as caught:
        sampling_params({field: value})
    assert caught.value.param == field


def test_two_limits_that_differ_are_refused():
    with pytest.raises(RequestError, match="differ"):
        sampling_params({"max_tokens": 5, "max_completion_tokens": 6})


def test_media_parts_become_media():
    content = [
        {"type": "image_url", "image_url": {"url": "a.png", "detail": "auto"}},
        {"type": "text", "text": "what?"},
        {"type": "video_url", "video_url": {"url": "b.mp4"}},
    ]
    made = request({"messages": [{"role": "user", "content": content}]})
    assert made.messages[0]["content"] == [
        {"type": "image", "image": ("image", "a.png")},
        {"type": "text", "text": "what?"},
        {"type": "video", "video": ("video", "b.mp4")},
    ]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": "me"}], "messages[0].name"),
        ([{"role": "assistant", "content": "x", "tool_calls": [1]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].image_url"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a", "detail": "low"}}]}],
            "messages[0].content[0].image_url.detail",
        ),
    ],
)
def test_wrong_messages_name_the_place(messages: Any, param: str):
    with pytest.raises(RequestError) as caught:
        request({"messages": messages})
    assert caught.value.param == param


def test_null_fields_of_a_message_are_nothing():
    message = {"role": "assistant", "content": "x", "tool_calls": None, "refusal": None}
    assert request({"messages": [message]}).messages == [{"role": "assistant", "content": "x"}]


def test_the_answer_is_a_chat_completion():
    completion = Completion(
        text="4",
        token_ids=(7,),
        finish_reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=10, completion_tokens=1, cached_tokens=8),
        logprobs=(TokenLogprob(7, -0.5, top=((7, -0.5), (8, -1.5))),),
    )
    body = completion_body(
        completion, completion_id="c", created=1, model="m", decode={7: "é", 8: "\ufffd"}.__getitem__
    )
    assert body["object"] == "chat.completion"
    assert body["model"] == "m"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "4"}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["content"] == [
        {
            "token": "é",
            "logprob": -0.5,
            "bytes": [195, 169],
            "top_logprobs": [
                {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
                {"token": "\ufffd", "logprob": -1.5, "bytes": None},
            ],
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 1,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
