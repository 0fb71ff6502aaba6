"""Decode steps: what adapters add to a step, and how near a step is to what the memory allows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from polylens.bench.sides import Side, alternate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from polylens.bench.result import Result
    from polylens.bench.setting import Setting
    from polylens.core import ChatRequest
    from polylens.engine.llm import LLM

READ_BYTES = 1 << 28
"""Far beyond any processor cache."""
READ_REPEATS = 12
SMALL_HEAD = "(vocabulary 512: hardly any time is the head's)"


def short_contexts(setting: Setting) -> Iterator[Result]:
    """As many adapters as sequences, against the base model, and the base model against the memory."""
    yield from _step(setting, setting.sizes.decode_texts[0], adapters_goal=1.15, memory_goal=2.0)


def long_contexts(setting: Setting) -> Iterator[Result]:
    """The same with longer contexts: keys and values are read beside the weights."""
    yield from _step(setting, setting.sizes.decode_texts[1], adapters_goal=None, memory_goal=None)


def _step(
    setting: Setting, context: int, *, adapters_goal: float | None, memory_goal: float | None
) -> Iterator[Result]:
    sizes = setting.sizes
    adapters = setting.adapters(sizes.decode_sequences)
    read_s = read_seconds_per_byte(setting)
    # With the prefix cache: only the first round prefills the contexts.
    with setting.dynamic(adapters, prefix_cache=True) as llm:
        side = Side(llm)
        ours = side.prepare([_request(setting, context, name) for name in adapters])
        theirs = side.prepare([_request(setting, context, None) for _ in adapters])
        a, b = alternate(
            [
                lambda: side.decode_step_s(ours, sizes.decode_steps),
                lambda: side.decode_step_s(theirs, sizes.decode_steps),
            ],
            setting.rounds,
        )
        weights = text_weight_bytes(llm)
    what = f"{len(adapters)} sequences with {context} tokens of context each"
    yield setting.compare(f"decode step, {what}, as many adapters vs base", a, b, adapters_goal)
    yield setting.compare(
        f"decode step, {what}, base vs reading its {weights / 1e6:.0f} MB of weights once at "
        f"{1e-9 / read_s:.1f} GB/s {SMALL_HEAD}",
        b,
        weights * read_s,
        memory_goal,
    )


def _request(setting: Setting, context: int, adapter: str | None) -> ChatRequest:
    return setting.request(context, adapter, max_tokens=setting.sizes.decode_steps + 4)


def text_weight_bytes(llm: LLM) -> int:
    """Bytes of the weights that a decode step reads: the text model's layers and the head."""
    loaded = llm.loaded
    embeddings = {id(parameter) for parameter in loaded.model.get_input_embeddings().parameters()}
    parameters = [*loaded.text_model.parameters(), *loaded.head.parameters()]
    own = {id(parameter): parameter for parameter in parameters if id(parameter) not in embeddings}
    return sum(parameter.numel() * parameter.element_size() for parameter in own.values())


def read_seconds_per_byte(setting: Setting) -> float:
    """The best of several reads of a large buffer, in the ways torch reads fastest."""
    flat = torch.ones(READ_BYTES // 4, device=setting.device)
    matrix = flat.view(4096, -1)
    vector = torch.ones(matrix.shape[1], device=setting.device)
    with torch.inference_mode():
        best = min(_read_s(way, setting.device) for way in (flat.sum, lambda: torch.mv(matrix, vector), flat.amax))
    return best / READ_BYTES


def _read_s(run: Callable[[], object], device: str) -> float:
    best = float("inf")
    for _ in range(READ_REPEATS):
        start = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
