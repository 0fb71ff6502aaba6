"""`polylens run`: answer one prompt."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polylens.cli.chat_body import DEFAULT_MAX_TOKENS, sampling_params
from polylens.cli.options import (
    AdapterOption,
    DeviceOption,
    DType,
    DTypeOption,
    JsonOption,
    KvBytesOption,
    MaxModelLenOption,
    ModelArgument,
    TrustOption,
    check_use,
    open_llm,
    parse_adapters,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polylens.core import Completion


def run(
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
        int, typer.Option("--max-tokens", metavar="N", help="Most tokens to answer with.")
    ] = DEFAULT_MAX_TOKENS,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="X", help="0 always takes the most likely token; more draws.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", metavar="X", help="Draw among the most likely tokens of this total chance.")
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option("--top-k", metavar="N", help="Draw among the N most likely tokens; 0: all.")
    ] = 0,
    min_p: Annotated[
        float, typer.Option("--min-p", metavar="X", help="Draw among tokens at least X times as likely as the best.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Makes draws repeatable.")] = None,
    json_output: JsonOption = False,
    dtype: DTypeOption = DType.AUTO,
    device: DeviceOption = "cpu",
    max_model_len: MaxModelLenOption = None,
    kv_bytes: KvBytesOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Answer one prompt about pictures or videos, with one of the adapters or with the base model.

    Example: polylens run MODEL --adapter gauges=./gauge-lora --use gauges --image dial.jpg --prompt "Read the dial."

    Prints the answer's text only; with --json an object with text, token_ids, finish_reason and usage.
    """
    adapters = parse_adapters(adapter)
    chosen = check_use(use, adapters)
    sampling = sampling_params(
        {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "seed": seed,
        }
    )
    messages = [{"role": "user", "content": _content(image or (), video or (), prompt)}]
    with open_llm(
        model,
        adapters,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        max_model_len=max_model_len,
        kv_bytes=kv_bytes,
    ) as llm:
        completion = llm.chat(messages, adapter=chosen, sampling=sampling)
    typer.echo(json.dumps(completion_json(completion), ensure_ascii=False) if json_output else completion.text)


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
