"""Check that adapters applied while running give what their merged checkpoints give.

Two kinds of batches run, in float32. In an *activation* batch there is one request of each adapter and one of
the base model, each about another picture; every adapted layer's output rows are compared with those of the
merged model for the same request. In the *token* batch all requests of all adapters and of the base run
together; their logits and greedy tokens are compared with those of the merged models, and the base's with
the base model alone.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from polylens.config import EngineConfig
from polylens.core import ChatRequest, SamplingParams
from polylens.engine.activations import record_adapter_rows, record_all_rows
from polylens.engine.compare import Comparison, compare, merge_comparisons
from polylens.engine.llm import LLM
from polylens.engine.merged import Reference, default_reference, merged_llm
from polylens.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from polylens.core import Completion
    from polylens.engine.activations import Recorded

__all__ = ["AdapterCheck", "Comparison", "LayerCheck", "Verification", "compare", "merged_llm", "verify"]

OWN_PICTURE_SIZES = ((224, 224), (336, 196), (140, 308), (448, 280))
"""(width, height) of the pictures made where none are given: unequal, so that a wrong row division shows."""

DEFAULT_MAX_TOKENS = 16
"""Answer tokens compared for each request: enough to run decode steps after every prefill."""

QUESTION = "Describe this picture."


@dataclass(frozen=True)
class LayerCheck:
    """One adapted layer against the merged model.

    rows: output rows compared; 0 if the model never calls the layer or the answer does not depend on it.
    rel_err: max_abs_err over the largest absolute value of the reference's rows.
    """

    name: str
    component: str
    rows: int
    max_abs_err: float
    rel_err: float


@dataclass(frozen=True)
class AdapterCheck:
    """One adapter against its merged weights. problems: one line for each thing that is not equal."""

    layers: tuple[LayerCheck, ...]
    comparison: Comparison
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.comparison.ok and not self.problems


@dataclass(frozen=True)
class Verification:
    """What `verify` found. base: the base model's answers in the mixed batch against the same ones alone."""

    reference: Reference
    adapters: Mapping[str, AdapterCheck]
    base: Comparison

    @property
    def ok(self) -> bool:
        # Ties are judged over all requests: one tie among few requests of one adapter says nothing.
        everything = merge_comparisons([self.base, *(check.comparison for check in self.adapters.values())])
        return everything.ok and not any(check.problems for check in self.adapters.values())


def verify(
    model: str | Path,
    adapters: Mapping[str, str | Path],
    *,
    images: Sequence[Any] = (),
    max_tokens: int = DEFAULT_MAX_TOKENS,
    reference: Reference | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
    tell: Callable[[str], None] = lambda _line: None,
) -> Verification:
    """Run the adapters mixed, and each against its own merged weights.

    images: pictures to ask about (paths or PIL images); without any, pictures of unequal sizes are made.
    Holds two copies of the model in float32. `tell` receives a line before each long step.
    Raises RequestError without adapters, and what loading and running raise.
    """
    if not adapters:
        raise RequestError("nothing to verify: give at least one adapter")
    # Caches off: every layer is to run for every request.
    config = EngineConfig(
        dtype="float32",
        device=device,
        trust_remote_code=trust_remote_code,
        prefix_cache=False,
        vision_cache_bytes=0,
    )
    reference = reference or default_reference()
    prompts = _Prompts.about(images or own_pictures())
    tell("loading the model and the adapters")
    with LLM(model, adapters, config=config) as mixed:
        tell("running all adapters and the base in one batch")
        answers = _token_batch(mixed, [*adapters, None], prompts, max_tokens)
        base = compare(answers[None], _token_batch(mixed, [None], prompts, max_tokens)[None])
        checks = {}
        for name, path in adapters.items():
            tell(f"{name}: merging with {'PEFT' if reference == 'peft' else 'our own merge'} and comparing")
            with merged_llm(model, path, reference=reference, config=config) as merged:
                checks[name] = _check(mixed, merged, name, prompts, answers[name], max_tokens)
            gc.collect()  # the merged model has reference cycles; the next one is loaded before they are found
    return Verification(reference, checks, base)


@dataclass(frozen=True)
class _Prompts:
    """Messages to ask. single: at most one picture each. more: several pictures in one request."""

    single: list[list[dict[str, Any]]]
    more: list[list[dict[str, Any]]]

    @classmethod
    def about(cls, images: Sequence[Any]) -> _Prompts:
        single = [_question([image]) for image in images] + [_question([])]
        return cls(single, [_question([images[0], images[-1]])])

    @property
    def all(self) -> list[list[dict[str, Any]]]:
        return self.single + self.more


def _question(images: Sequence[Any]) -> list[dict[str, Any]]:
    pictures = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": QUESTION}]}]


def own_pictures() -> list[Image.Image]:
    """Pictures with gradients and noise, always the same ones, of unequal sizes."""
    return [_picture(width, height, seed) for seed, (width, height) in enumerate(OWN_PICTURE_SIZES)]


def _picture(width: int, height: int, seed: int) -> Image.Image:
    x_w, y_h = np.linspace(0, 255, width), np.linspace(0, 255, height)
    ramps_hwc = np.stack(np.broadcast_arrays(x_w[None, :], y_h[:, None], (x_w[None, :] + y_h[:, None]) / 2), axis=-1)
    noise_hwc = np.random.default_rng(seed).uniform(-64, 64, ramps_hwc.shape)
    return Image.fromarray(np.clip(ramps_hwc + noise_hwc, 0, 255).astype(np.uint8))


def _token_batch(
    llm: LLM, adapters: Sequence[str | None], prompts: _Prompts, max_tokens: int
) -> dict[str | None, list[Completion]]:
    """Every prompt with every adapter, in one batch."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, return_logits=True)
    asked = [ChatRequest(messages, name, sampling) for messages in prompts.all for name in adapters]
    answers: dict[str | None, list[Completion]] = {name: [] for name in adapters}
    for request, answer in zip(asked, _answers(llm, asked), strict=True):
        answers[request.adapter].append(answer)
    return answers


def _answers(llm: LLM, requests: Sequence[ChatRequest]) -> list[Completion]:
    return llm.generate(requests)  # type: ignore[return-value]  # errors are raised, not returned


def _check(
    mixed: LLM, merged: LLM, name: str, prompts: _Prompts, answers: list[Completion], max_tokens: int
) -> AdapterCheck:
    comparison = compare(answers, _token_batch(merged, [None], prompts, max_tokens)[None])
    layers, problems = _check_layers(mixed, merged, name, prompts)
    return AdapterCheck(layers, comparison, (*comparison.differences, *problems))


@dataclass
class _Tally:
    """Largest values over the batches, for one layer."""

    rows: int = 0
    max_abs_err: float = 0.0
    max_reference: float = 0.0
    problem: str = ""

    def add(self, ours_no: torch.Tensor, theirs_no: torch.Tensor) -> None:
        self.rows += len(ours_no)
        error = float((ours_no - theirs_no).abs().max())
        # NaN compares as False with everything: it must not look like a small error.
        self.max_abs_err = max(self.max_abs_err, float("inf") if error != error else error)
        self.max_reference = max(self.max_reference, float(theirs_no.abs().max()))


def _check_layers(
    mixed: LLM, merged: LLM, name: str, prompts: _Prompts
) -> tuple[tuple[LayerCheck, ...], tuple[str, ...]]:
    adapter = mixed.registry.get(name)
    without_effect = mixed.registry.report(name).no_effect  # the mixed batch leaves them as they are
    tallies = {layer: _Tally() for layer in adapter.deltas}
    for turn, messages in enumerate(prompts.single):
        with record_adapter_rows(mixed, adapter) as ours:
            _answers(mixed, _activation_batch(mixed, name, prompts, turn))
        with record_all_rows(merged, list(adapter.deltas)) as theirs:
            _answers(merged, [ChatRequest(messages, None, _PREFILL_ONLY)])
        for layer, tally in tallies.items():
            if layer not in without_effect:
                _compare_rows(layer, tally, ours, theirs)
    specs = mixed.loaded.layers.specs
    layers = tuple(
        LayerCheck(
            name=layer,
            component=specs[layer].component.value,
            rows=tally.rows,
            max_abs_err=tally.max_abs_err,
            rel_err=tally.max_abs_err / tally.max_reference if tally.max_reference else 0.0,
        )
        for layer, tally in tallies.items()
    )
    return layers, tuple(tally.problem for tally in tallies.values() if tally.problem)


_PREFILL_ONLY = SamplingParams(max_tokens=1, ignore_eos=True)


def _activation_batch(llm: LLM, name: str, prompts: _Prompts, turn: int) -> list[ChatRequest]:
    """Adapter `name` with prompt number `turn`; the base and the other adapters with the prompts after it."""
    names = [name, None, *(other for other in llm.adapters if other != name)]
    single = prompts.single
    return [ChatRequest(single[(turn + i) % len(single)], who, _PREFILL_ONLY) for i, who in enumerate(names)]


def _compare_rows(layer: str, tally: _Tally, ours: Recorded, theirs: Recorded) -> None:
    if layer not in ours or layer not in theirs:
        return  # text only
    ours_no, theirs_no = torch.cat(ours[layer]), torch.cat(theirs[layer])
    if ours_no.shape == theirs_no.shape:
        tally.add(ours_no, theirs_no)
    else:
        tally.problem = f"{layer}: {len(ours_no)} rows in the mixed batch, {len(theirs_no)} in the merged model"
