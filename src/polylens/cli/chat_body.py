"""From the body of an OpenAI chat completion request to a `ChatRequest`, and from the answer back to a body.

Every field is either honoured, or has a value that asks for nothing, or is refused by name: nothing that
would change the answer is accepted and ignored.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

from polylens.core import ChatRequest, SamplingParams, is_finite
from polylens.errors import RequestError, UnknownAdapterError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from polylens.core import Completion, TokenLogprob

    ResolveMedia = Callable[[str, str], Any]
    """(kind "image" or "video", url or path as written) -> what a ChatRequest takes as that media."""

T = TypeVar("T")

DEFAULT_MAX_TOKENS = 256
"""Where a body names no limit. Short enough that a batch of questions about pictures ends soon."""

MAX_TOP_LOGPROBS = 20
"""OpenAI's own limit of `top_logprobs`."""

ROLES = ("system", "user", "assistant")

_NO_EFFECT = frozenset(
    {"model", "messages", "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
)
"""Fields read elsewhere, or that say nothing about the answer."""

_ONLY_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "store": (False,),
}
"""Fields polylens does not apply, with the values that ask for nothing; null asks for nothing in any field.

`tool_choice` and the like are without effect as long as there are no tools.
"""


def chat_request(
    body: Mapping[str, Any], adapters: Collection[str], base_names: Collection[str], media: ResolveMedia
) -> ChatRequest:
    """Read a request body.

    `adapters`: the loaded adapters' names; `base_names`: what `model` may say for the base model.
    Raises RequestError naming the field at fault, UnknownAdapterError for an unknown `model`.
    """
    model = _of_type(body, "model", str)
    if model is None:
        raise RequestError("'model' is missing: name an adapter, or the base model", "model")
    if model not in adapters and model not in base_names:
        raise UnknownAdapterError(model, tuple(adapters))
    return ChatRequest(
        messages=_messages(body, media), adapter=model if model in adapters else None, sampling=sampling_params(body)
    )


def sampling_params(body: Mapping[str, Any]) -> SamplingParams:
    """The sampling fields of a body. Raises RequestError for a bad value, or a field that is not supported."""
    sampling = SamplingParams(
        max_tokens=_max_tokens(body),
        temperature=_number(body, "temperature", 0.0, low=0.0),
        top_p=_number(body, "top_p", 1.0, above=0.0, high=1.0),
        top_k=_integer(body, "top_k", 0, low=0),
        min_p=_number(body, "min_p", 0.0, low=0.0, below=1.0),
        seed=_integer(body, "seed", None),
        stop=_stop(body),
        stop_token_ids=_stop_token_ids(body),
        logprobs=_logprobs(body),
        ignore_eos=bool(_of_type(body, "ignore_eos", bool)),
    )
    _refuse_the_rest(body)
    return sampling


_READ = frozenset(
    {
        "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
        "stop_token_ids", "logprobs", "top_logprobs", "ignore_eos",
    }
)  # fmt: skip


def _refuse_the_rest(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in _NO_EFFECT or name in _READ or value is None:
            continue
        neutral = _ONLY_NEUTRAL.get(name)
        if neutral is None:
            raise RequestError(f"{name!r} is not supported; remove it", name)
        if value not in neutral:
            raise RequestError(f"{name!r} is not supported; remove it, or leave it at {neutral[0]!r}", name)


def _max_tokens(body: Mapping[str, Any]) -> int:
    old = _integer(body, "max_tokens", None, low=1)
    new = _integer(body, "max_completion_tokens", None, low=1)
    if old is not None and new is not None and old != new:
        raise RequestError("'max_tokens' and 'max_completion_tokens' differ; give one of them", "max_tokens")
    return next((n for n in (new, old) if n is not None), DEFAULT_MAX_TOKENS)


def _stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    value = body.get("stop")
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RequestError("'stop' must be a text or a list of texts, none of them empty", "stop")
    return tuple(texts)


def _stop_token_ids(body: Mapping[str, Any]) -> tuple[int, ...]:
    ids = body.get("stop_token_ids") or []
    if not isinstance(ids, list) or not all(_is_integer(token) and token >= 0 for token in ids):
        raise RequestError("'stop_token_ids' must be a list of token ids", "stop_token_ids")
    return tuple(ids)


def _logprobs(body: Mapping[str, Any]) -> int | None:
    wanted = _of_type(body, "logprobs", bool)
    top = _integer(body, "top_logprobs", None, low=0, high=MAX_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise RequestError("'top_logprobs' needs 'logprobs': true", "top_logprobs")
    return (top or 0) if wanted else None


def _of_type(body: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise RequestError(f"{name!r} must be {_KIND_NAMES[kind]}, not {value!r:.80}", name)
    return value


_KIND_NAMES: dict[type, str] = {str: "a text", bool: "true or false", list: "a list", dict: "an object"}


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(
    body: Mapping[str, Any], name: str, default: Any, *, low: int | None = None, high: int | None = None
) -> Any:
    value = body.get(name)
    if value is None:
        return default
    too_low = low is not None and _is_integer(value) and value < low
    too_high = high is not None and _is_integer(value) and value > high
    if not _is_integer(value) or too_low or too_high:
        raise RequestError(f"{name!r} must be a whole number{_bounds(low, high)}, not {value!r:.80}", name)
    return value


def _number(
    body: Mapping[str, Any],
    name: str,
    default: float,
    *,
    low: float = -math.inf,
    above: float = -math.inf,
    high: float = math.inf,
    below: float = math.inf,
) -> float:
    """A finite number in [low, high], (above, …) or (…, below)."""
    value = body.get(name)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value)
    if not is_number or not (low <= value <= high and above < value < below):
        limits = [
            f"at least {low:g}" if low > -math.inf else "",
            f"above {above:g}" if above > -math.inf else "",
            f"at most {high:g}" if high < math.inf else "",
            f"below {below:g}" if below < math.inf else "",
        ]
        raise RequestError(f"{name!r} must be a number {' and '.join(filter(None, limits))}, not {value!r:.80}", name)
    return float(value)


def _bounds(low: int | None, high: int | None) -> str:
    return (f" of at least {low}" if low is not None else "") + (f" and at most {high}" if high is not None else "")


def _messages(body: Mapping[str, Any], media: ResolveMedia) -> list[dict[str, Any]]:
    messages = _of_type(body, "messages", list)
    if not messages:
        raise RequestError("'messages' is missing or empty", "messages")
    return [_message(message, f"messages[{index}]", media) for index, message in enumerate(messages)]


def _message(message: Any, where: str, media: ResolveMedia) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{where} must be an object", where)
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, not {role!r:.80}", f"{where}.role")
    for name, value in message.items():
        if name not in ("role", "content") and value is not None:
            raise RequestError(f"{where}.{name} is not supported; remove it", f"{where}.{name}")
    content = message.get("content")
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not isinstance(content, list) or not content:
        raise RequestError(f"{where}.content must be a text or a list of parts", f"{where}.content")
    parts = [_part(part, f"{where}.content[{index}]", media) for index, part in enumerate(content)]
    return {"role": role, "content": parts}


def _part(part: Any, where: str, media: ResolveMedia) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        _only(part, ("type", "text"), where)
        return {"type": "text", "text": part["text"]}
    if kind in ("image_url", "video_url"):
        _only(part, ("type", kind), where)
        short = kind.removesuffix("_url")
        return {"type": short, short: media(short, _url(part.get(kind), f"{where}.{kind}"))}
    raise RequestError(f"{where} must be a text, image_url or video_url part, not {part!s:.80}", where)


def _url(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("url"), str):
        raise RequestError(f"{where} must be an object with a 'url'", where)
    if value.get("detail") not in (None, "auto"):
        raise RequestError(f"{where}.detail is not supported; remove it, or leave it at 'auto'", f"{where}.detail")
    _only(value, ("url", "detail"), where)
    return str(value["url"])


def _only(mapping: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name, value in mapping.items():
        if name not in known and value is not None:
            raise RequestError(f"{where}.{name} is not supported; remove it", f"{where}.{name}")


def completion_body(
    completion: Completion, *, completion_id: str, created: int, model: str, decode: Callable[[int], str]
) -> dict[str, Any]:
    """An OpenAI `chat.completion` object. `decode` gives one token's text, for logprobs."""
    usage = completion.usage
    logprobs = completion.logprobs
    return {
        "id": completion_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": completion.text},
                "finish_reason": completion.finish_reason.value,
                "logprobs": None if logprobs is None else {"content": [_logprob(item, decode) for item in logprobs]},
            }
        ],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
    }


def _logprob(item: TokenLogprob, decode: Callable[[int], str]) -> dict[str, Any]:
    top = [_token(token_id, logprob, decode) for token_id, logprob in item.top]
    return {**_token(item.token_id, item.logprob, decode), "top_logprobs": top}


def _token(token_id: int, logprob: float, decode: Callable[[int], str]) -> dict[str, Any]:
    text = decode(token_id)
    # A token can be part of a character: its text is then U+FFFD, and its bytes are not those of that sign.
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}
