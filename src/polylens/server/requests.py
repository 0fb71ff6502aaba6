"""From a body to what the engine takes: sampling parameters and a request."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from polylens.core import Constraint, SamplingParams
from polylens.errors import RequestError
from polylens.server.schema import MAX_STOPS, ChatBody, CompletionBody, JsonObjectFormat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polylens.server.schema import JsonSchemaFormat, SamplingFields, StructuredOutputs

SERVED_DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""OpenAI's and vLLM's values of fields that neither the request nor the model's generation config gives."""


def sampling_params(body: SamplingFields, defaults: Mapping[str, Any], max_tokens: int) -> SamplingParams:
    """How the answer is to be sampled.

    defaults: of fields the request leaves out (`--generation-config`). max_tokens: where neither says; the
    engine cuts it to what the context leaves. Raises RequestError.
    """
    return SamplingParams(
        max_tokens=_max_tokens(body, defaults, max_tokens),
        temperature=_value(body, "temperature", defaults),
        top_p=_value(body, "top_p", defaults),
        top_k=max(_value(body, "top_k", defaults), 0),  # -1 is vLLM's "off"
        min_p=_value(body, "min_p", defaults),
        seed=body.seed,
        stop=_stops(body),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logprobs=_logprobs(body),
        ignore_eos=body.ignore_eos,
        presence_penalty=_value(body, "presence_penalty", defaults),
        frequency_penalty=_value(body, "frequency_penalty", defaults),
        repetition_penalty=_value(body, "repetition_penalty", defaults),
        logit_bias=_logit_bias(body),
        constraint=_constraint(body),
    )


def _value(body: SamplingFields, name: str, defaults: Mapping[str, Any]) -> Any:
    given = getattr(body, name)
    return given if given is not None else defaults.get(name, SERVED_DEFAULTS[name])


def _max_tokens(body: SamplingFields, defaults: Mapping[str, Any], otherwise: int) -> int:
    old, new = body.max_tokens, body.max_completion_tokens if isinstance(body, ChatBody) else None
    if old is not None and new is not None and old != new:
        raise RequestError("'max_tokens' and 'max_completion_tokens' differ; give one of them", "max_tokens")
    limit = defaults.get("max_tokens")
    wanted = new if new is not None else old
    if wanted is None:
        return limit if limit is not None else otherwise
    return wanted if limit is None else min(wanted, limit)


def _stops(body: SamplingFields) -> tuple[str, ...]:
    stops = body.stop if isinstance(body.stop, list) else [body.stop] if body.stop else []
    if len(stops) > MAX_STOPS:
        raise RequestError(f"'stop' has {len(stops)} texts; at most {MAX_STOPS} are taken", "stop")
    return tuple(stops)


def _logprobs(body: SamplingFields) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    assert isinstance(body, ChatBody)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs': true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _logit_bias(body: SamplingFields) -> dict[int, float]:
    try:
        return {int(token): value for token, value in (body.logit_bias or {}).items()}
    except ValueError as error:
        raise RequestError("'logit_bias' must map token ids to numbers from -100 to 100", "logit_bias") from error


def _constraint(body: SamplingFields) -> Constraint | None:
    """The form the answer must have, in whichever of its spellings."""
    named = [name for name in _CONSTRAINTS if getattr(body, name) is not None]
    if body.response_format is not None and body.response_format.type == "text":
        named.remove("response_format")
    if len(named) > 1:
        raise RequestError(f"{named[0]!r} and {named[1]!r} are both given; give one of them", named[1])
    if not named:
        return None
    try:
        return _CONSTRAINTS[named[0]](getattr(body, named[0]))
    except RequestError as error:
        raise RequestError(f"{named[0]}: {error}", named[0]) from error


def _response_format(given: JsonObjectFormat | JsonSchemaFormat) -> Constraint:
    if isinstance(given, JsonObjectFormat):
        return Constraint("json_object")
    return Constraint("json_schema", given.json_schema.schema_)


def _guided_json(given: dict[str, Any] | str) -> Constraint:
    """vLLM takes the schema as an object, or as its text."""
    if isinstance(given, str):
        try:
            return Constraint("json_schema", json.loads(given))
        except (ValueError, RecursionError) as error:
            raise RequestError("it is no JSON") from error
    return Constraint("json_schema", given)


def _structured_outputs(given: StructuredOutputs) -> Constraint:
    forms = {"json_schema": given.json_, "regex": given.regex, "choice": given.choice}
    named = {kind: value for kind, value in forms.items() if value is not None}
    if len(named) != 1:
        raise RequestError("give exactly one of 'json', 'regex' and 'choice'")
    kind, value = next(iter(named.items()))
    return Constraint(kind, value)  # type: ignore[arg-type]


_CONSTRAINTS: dict[str, Callable[[Any], Constraint]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _guided_json,
    "guided_regex": lambda pattern: Constraint("regex", pattern),
    "guided_choice": lambda choices: Constraint("choice", tuple(choices)),
}
"""Field -> what it asks for. The first is OpenAI's, the others are vLLM's, old and new."""


def chat_options(body: ChatBody) -> dict[str, Any]:
    """Fields of a `ChatRequest` beside messages, adapter and sampling."""
    settings = body.mm_processor_kwargs
    return {
        "cache_salt": body.cache_salt,
        "mm_processor_kwargs": settings.model_dump(exclude_none=True) if settings is not None else None,
        "chat_template_kwargs": body.chat_template_kwargs,
    }


def include_usage(body: SamplingFields) -> bool:
    """Whether a stream shall end with the usage. Raises RequestError for stream options without a stream."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("'stream_options' needs 'stream': true", "stream_options")
    return body.stream_options is not None and body.stream_options.include_usage


def text_prompts(body: CompletionBody) -> list[str | list[int]]:
    """The prompts of a plain completion, however many are written."""
    prompt = body.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]  # one text, or the ids of one
    return list(prompt)  # type: ignore[arg-type]
