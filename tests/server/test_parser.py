"""The parser of bodies under random input: it gives a request, or one RequestError that names a field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polylens.core import SamplingParams
from polylens.errors import RequestError
from polylens.server.parse import parse_body
from polylens.server.requests import chat_options, sampling_params, text_prompts
from polylens.server.schema import ChatBody, CompletionBody, LoadBody, TokenizeBody

EXAMPLES = 150

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = [{"role": "user", "content": "hi"}]
GOOD: dict[str, Any] = {"model": "m", "messages": MESSAGES, "prompt": "hi"}
FIELDS = sorted({*ChatBody.model_fields, *CompletionBody.model_fields})


def read(kind: Any, body: Any) -> SamplingParams | None:
    """The whole way from bytes to sampling parameters; None for a RequestError, which must be one line."""
    try:
        parsed = parse_body(kind, body if isinstance(body, bytes) else json.dumps(body).encode())
        if isinstance(parsed, ChatBody):
            chat_options(parsed)
        if isinstance(parsed, CompletionBody):
            assert text_prompts(parsed)
        return sampling_params(parsed, {}, 100) if isinstance(parsed, ChatBody | CompletionBody) else None
    except RequestError as caught:
        line = str(caught)
    assert 0 < len(line) < 1000
    assert "\n" not in line
    return None


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, TokenizeBody, LoadBody])
@given(raw=st.binary(max_size=60))
@settings(max_examples=EXAMPLES, deadline=None)
def test_any_bytes(kind: Any, raw: bytes):
    read(kind, raw)


@given(body=JSON)
@settings(max_examples=EXAMPLES, deadline=None)
def test_any_json(body: Any):
    read(ChatBody, body)
    read(CompletionBody, body)


@given(name=st.sampled_from(FIELDS), value=JSON)
@settings(max_examples=3 * EXAMPLES, deadline=None)
def test_any_value_in_any_field(name: str, value: Any):
    for kind in (ChatBody, CompletionBody):
        own = {field: GOOD[field] for field in kind.model_fields.keys() & GOOD.keys()}
        sampling = read(kind, {**own, name: value})
        if sampling is not None and value is None:
            assert sampling == read(kind, own) or name in own


@given(content=JSON | st.lists(st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"])}, optional={
    "text": JSON, "image_url": JSON,
}), max_size=3))  # fmt: skip
@settings(max_examples=EXAMPLES, deadline=None)
def test_any_content(content: Any):
    read(ChatBody, {**GOOD, "prompt": None, "messages": [{"role": "user", "content": content}]})


@given(name=st.text(min_size=1, max_size=20).filter(lambda name: name not in FIELDS), value=JSON)
@settings(max_examples=EXAMPLES, deadline=None)
def test_unknown_fields_are_refused_unless_null(name: str, value: Any):
    body = {"model": "m", "messages": MESSAGES, name: value}
    assert (read(ChatBody, body) is None) == (value is not None)


def test_defaults_are_as_the_operator_says():
    body = parse_body(ChatBody, json.dumps({"model": "m", "messages": MESSAGES, "top_p": 0.5}).encode())
    sampling = sampling_params(
        body, {"temperature": 0.2, "top_p": 0.9, "max_tokens": 7, "repetition_penalty": 1.1}, 100
    )
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.2, 0.5, 7)
    assert sampling.repetition_penalty == 1.1
    plain = sampling_params(body, {}, 100)
    assert (plain.temperature, plain.top_k, plain.max_tokens) == (1.0, 0, 100)


def test_max_tokens_of_either_name_within_the_operators():
    def tokens(limits: dict[str, int], **fields: int) -> int:
        body = parse_body(ChatBody, json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode())
        return sampling_params(body, limits, 100).max_tokens

    assert tokens({}, max_tokens=5) == tokens({}, max_completion_tokens=5) == 5
    assert tokens({}, max_tokens=5, max_completion_tokens=5) == 5
    assert tokens({"max_tokens": 3}, max_tokens=5) == 3
    with pytest.raises(RequestError):
        tokens({}, max_tokens=5, max_completion_tokens=6)
