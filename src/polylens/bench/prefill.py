"""Time to first token: adapters applied while running against the same adapters merged into the weights."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForImageTextToText

from polylens.bench.sides import Side, alternate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from polylens.bench.result import Result
    from polylens.bench.setting import Setting
    from polylens.core import ChatRequest
    from polylens.engine.llm import LLM

FEW_ROWS = 256
"""Below, a layer's fixed costs weigh more and the goal is wider."""


def picture(setting: Setting) -> Iterator[Result]:
    """One picture and a long text."""
    requests = [setting.picture_request(name) for name in ("adapter-1", None)]
    with setting.dynamic(setting.adapters(1)) as dynamic, setting.merged() as merged:
        a, b = _compare(setting, dynamic, merged, requests[:1], requests[1:])
    yield setting.compare("time to first token, picture and long text, dynamic vs merged", a, b, 1.03)


def four_adapters(setting: Setting) -> Iterator[Result]:
    adapters = setting.adapters(4)
    with setting.dynamic(adapters) as dynamic, setting.merged() as merged:
        ours = [setting.picture_request(name, seed) for seed, name in enumerate(adapters)]
        theirs = [setting.picture_request(None, seed) for seed in range(len(adapters))]
        a, b = _compare(setting, dynamic, merged, ours, theirs)
    yield setting.compare("four picture requests in one batch, four adapters vs one merged model", a, b, 1.05)


def sweep(setting: Setting) -> Iterator[Result]:
    """Text only, over lengths and ranks: the worst below and from 256 rows on."""
    sizes = setting.sizes
    adapters = {f"rank-{rank}": setting.adapter(1, rank) for rank in sizes.sweep_ranks}
    found: list[tuple[int, str, float, float]] = []
    with setting.dynamic(adapters) as dynamic, setting.merged() as merged:
        for num_tokens in sizes.sweep_texts:
            for name in adapters:
                ours, theirs = setting.request(num_tokens, name), setting.request(num_tokens, None)
                found.append((num_tokens, name, *_compare(setting, dynamic, merged, [ours], [theirs])))
    for num_tokens, name, a, b in found:
        yield setting.compare(f"time to first token, text of {num_tokens}, {name}, dynamic vs merged", a, b, None)
    for few, goal in ((True, 1.10), (False, 1.05)):
        part = [entry for entry in found if (entry[0] < FEW_ROWS) is few]
        if part:
            num_tokens, name, a, b = max(part, key=lambda entry: entry[2] / entry[3])
            rows = f"{'below' if few else 'from'} {FEW_ROWS} rows"
            yield setting.compare(
                f"time to first token, worst of the sweep {rows} (text of {num_tokens}, {name}), dynamic vs merged",
                a,
                b,
                goal,
            )


def video(setting: Setting) -> Iterator[Result]:
    adapters = setting.adapters(2)
    with setting.dynamic(adapters) as dynamic, setting.merged() as merged:
        ours = [setting.video_request(name, seed) for seed, name in enumerate(adapters)]
        theirs = [setting.video_request(None, seed) for seed in range(len(adapters))]
        a, b = _compare(setting, dynamic, merged, ours, theirs)
    yield setting.compare(f"two videos of {setting.sizes.num_frames} frames, two adapters vs merged", a, b, 1.05)


def transformers_own(setting: Setting) -> Iterator[Result]:
    """The base model in the engine against transformers' own forward of the same prompt, its cache written."""
    theirs: Any = AutoModelForImageTextToText.from_pretrained(
        setting.model, dtype=setting.torch_dtype, attn_implementation="sdpa"
    )
    theirs = theirs.to(setting.device)
    with setting.dynamic({}) as base:
        side = Side(base)
        prepared = side.prepare([setting.picture_request(None)])
        prompt = prepared[0].prompt
        inputs = {name: tensor.to(setting.device) for item in prompt.items for name, tensor in item.tensors.items()}
        inputs["pixel_values"] = inputs["pixel_values"].to(setting.torch_dtype)
        inputs["input_ids"] = torch.tensor([prompt.token_ids], device=setting.device)
        image_id = theirs.config.image_token_id
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == image_id).int()

        def forward() -> float:
            start = time.perf_counter()
            with torch.inference_mode():
                output = theirs(**inputs, use_cache=True, logits_to_keep=1)
                output.logits.argmax(-1).tolist()
            return time.perf_counter() - start

        a, b = alternate([lambda: side.until_done_s(prepared), forward], setting.rounds)
    yield setting.compare("time to first token, picture and long text, base vs transformers' own forward", a, b, 1.0)


def _compare(
    setting: Setting, dynamic: LLM, merged: LLM, ours: Sequence[ChatRequest], theirs: Sequence[ChatRequest]
) -> tuple[float, float]:
    ours_side, theirs_side = Side(dynamic), Side(merged)
    ours_prepared, theirs_prepared = ours_side.prepare(ours), theirs_side.prepare(theirs)
    a, b = alternate(
        [lambda: ours_side.until_done_s(ours_prepared), lambda: theirs_side.until_done_s(theirs_prepared)],
        setting.rounds,
    )
    return a, b
