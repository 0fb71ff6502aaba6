"""`polylens run`: answer one prompt."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polylens.cli.options import (
    AdapterOption,
    JsonOption,
    ModelArgument,
    adapted_config,
    check_use,
    open_llm,
    parse_adapters,
    takes,
)
from polylens.config import EngineConfig
from polylens.core import BASE_NAME, ChatRequest, Completion
from polylens.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polylens.core import Request

DEFAULT_MAX_TOKENS = 256
"""Where nothing is said: short enough that a question about a picture ends soon."""


@takes(adapted_config)
def run(
    config: EngineConfig,
    model: ModelArgument,
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="What to ask.")],
    adapter: AdapterOption = None,
    use: Annotated[
        str | None,
        typer.Option("--use", metavar="NAME", help="The adapter that answers; without it the base model does."),
    ] = None,
    image: Annotated[
        list[str] | None, typer.Option("--image", metavar="FILE", help="A picture. Repeat for more, in order.")
    ] = None,
    video: Annotated[
        list[str] | None, typer.Option("--video", metavar="FILE", help="A video. Repeat for more, in order.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", metavar="N", help=f"Most tokens to answer with; without it {DEFAULT_MAX_TOKENS}."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", metavar="X", help="More than 0 draws; else the most likely token is taken."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", metavar="X", help="Draw among the most likely tokens of this total chance."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", metavar="N", help="Draw among the N most likely tokens; 0: all.")
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option("--min-p", metavar="X", help="Draw among tokens at least X times as likely as the best."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Makes draws repeatable.")] = None,
    fields: Annotated[
        str | None,
        typer.Option(
            "--fields",
            metavar="JSON",
            help='More fields of the request, as the server has them: \'{"stop": ["."]}\'.',
        ),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Answer one prompt about pictures or videos, with one of the adapters or with the base model.

    Example: polylens run MODEL --adapter gauges=./gauge-lora --use gauges --image dial.jpg --prompt "Read the dial."

    Prints the answer's text only; with --json an object with text, token_ids, finish_reason and usage.
    """
    adapters = parse_adapters(adapter)
    chosen = check_use(use, adapters)
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
    }
    request = _request(given, fields, _content(image or (), video or (), prompt), chosen)
    with open_llm(model, adapters, config) as llm:
        (completion,) = llm.generate([request])
    assert isinstance(completion, Completion)
    typer.echo(json.dumps(completion_json(completion), ensure_ascii=False) if json_output else completion.text)


NOT_FIELDS = ("model", "messages", "n", "stream", "stream_options", "logprobs", "top_logprobs", "deadline_s")
"""Fields of a body that one printed answer has no place for, or that options of the command say."""


def _request(given: dict[str, Any], fields: str | None, content: list[dict[str, Any]], adapter: str | None) -> Request:
    """The request, its fields read as the server reads a body. Raises RequestError."""
    from polylens.server.parse import parse_body
    from polylens.server.requests import chat_options, sampling_params
    from polylens.server.schema import ChatBody

    more = _read_fields(fields)
    if twice := sorted(name for name in more if name in NOT_FIELDS or given.get(name) is not None):
        raise RequestError(f"--fields cannot have {twice[0]!r}: see the other options, or `polylens batch`", twice[0])
    said = {name: value for name, value in given.items() if value is not None}
    whole = {"model": BASE_NAME, "messages": [{"role": "user", "content": ""}], **said, **more}
    body = parse_body(ChatBody, json.dumps(whole).encode())
    sampling = sampling_params(body, {"temperature": 0.0}, DEFAULT_MAX_TOKENS)
    return ChatRequest([{"role": "user", "content": content}], adapter, sampling, body.request_id, **chat_options(body))


def _read_fields(text: str | None) -> dict[str, Any]:
    try:
        fields = json.loads(text) if text is not None else {}
    except (ValueError, RecursionError) as error:
        raise RequestError(f"--fields is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError("--fields must be a JSON object")
    return fields


def _content(images: Sequence[str], videos: Sequence[str], prompt: str) -> list[dict[str, Any]]:
    """Message parts: the pictures, then the videos, then the text. Read here: a wrong file need not wait for
    the model to load."""
    from polylens.models.media import load_image, load_video

    return [
        *({"type": "image", "image": load_image(path)} for path in images),
        *({"type": "video", "video": load_video(path)} for path in videos),
        {"type": "text", "text": prompt},
    ]


def completion_json(completion: Completion) -> dict[str, Any]:
    """What `--json` prints of a completion."""
    usage = completion.usage
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
    }
