"""Whether the engine computes what transformers computes, found out by running both on a small stand-in.

The families of `FAMILIES` are proven by the project's tests. Any other model, and a family with a text model that is
not its own (LLaVA takes any), is proven when it is loaded: the engine answers two requests with pictures in one batch,
their prompts cut in chunks, and every logit must be that of transformers' own generation. Such a test must be able to
fail: so it is repeated with a mask that is wrong and with a picture that is another, and then it must. What cannot be
proven is not trusted: transformers' generation serves the model, slower and never wrong.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from polylens.config import EngineConfig
from polylens.core import ChatRequest, SamplingParams
from polylens.disk_cache import DiskCache
from polylens.engine.plan import MemoryPlan
from polylens.models.families import TwoWay
from polylens.models.generation import generation_steps
from polylens.models.loading import prepare_model
from polylens.models.probe import exact_float32
from polylens.models.probe_model import model_facts
from polylens.models.processing import Processing
from polylens.models.stand_in import stand_in

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from polylens.models.loading import LoadedModel

logger = logging.getLogger(__name__)

PROOF_VERSION = 6
"""Raise whenever the proof may end otherwise for the same model."""

MAX_ERROR = 3e-4
"""Largest error of a logit, relative to the logits' root mean square, that float32 explains: seen are 1e-6 to 4e-5."""

MIN_CONTRAST = 10.0
"""A wrong run must be off by so many times what counts as equal."""

MAX_REASON = 160
"""Characters shown of what transformers says where it fails."""

_AMPLE = MemoryPlan(
    budget_bytes=1 << 40,
    weight_bytes=0,
    encoder_bytes=0,
    step_bytes=0,
    adapter_scratch_bytes=0,
    features_bytes=0,
    kv_bytes=1 << 32,
    vision_cache_bytes=1 << 28,
    adapter_bytes=0,
    max_encoder_rows=1 << 20,
    max_item_rows=1 << 20,
    kv_tokens=1 << 20,
)
"""A stand-in and two prompts are small wherever the model itself fits: nothing need be measured. Pages are made for no
more tokens than these prompts have."""

NUM_TOKENS = 4
"""Tokens generated a request: the prefill's, and three decodes."""

PICTURES = ((48, 32), (32, 48), (40, 40))
"""Width and height (pixels): processors enlarge them as far as they need."""

WORDS = "what is in the picture and what is shown in this one describe the difference between the first and the second"


@dataclass(frozen=True)
class Proof:
    """reason: why the engine must not run the model's text part; None if it may. error: the engine against
    transformers, contrast: wrong runs against transformers, both relative to the logits' root mean square."""

    reason: str | None
    error: float = math.inf
    contrast: float = 0.0


def settled(loaded: LoadedModel) -> LoadedModel:
    """`loaded`, proven or given over to transformers' own generation."""
    if loaded.is_hosted or loaded.is_proven:
        return loaded
    proof = prove(loaded)
    if proof.reason is None:
        return dataclasses.replace(loaded, is_proven=True)
    logger.warning("%s: transformers generates, one request at a time, as %s", loaded.source, proof.reason)
    return loaded.hosted(proof.reason)


def prove(loaded: LoadedModel, *, cache_dir: Path | None = None) -> Proof:
    """Run the proof for a model, or find its result on disk."""
    cache = DiskCache("text-proof", PROOF_VERSION, cache_dir)
    facts = _facts(loaded)
    known = cache.load(facts, lambda content: Proof(**content))
    if known is not None:
        return known
    proof = _prove(loaded)
    cache.store(facts, dataclasses.asdict(proof))
    return proof


def _facts(loaded: LoadedModel) -> Mapping[str, Any]:
    """What a result depends on, besides the proof itself."""
    return {
        **model_facts(loaded),
        "device": loaded.device.type,
        "template": loaded.processing.template,
        "notes": {field.name: _described(getattr(loaded.notes, field.name)) for field in fields(loaded.notes)},
    }


def _described(note: Any) -> str:
    return f"{note.__module__}.{note.__qualname__}" if callable(note) else repr(note)


def _prove(loaded: LoadedModel) -> Proof:
    """The proof is a border to any architecture's code, run on a config changed by us: where that code fails, nothing
    is known, and the model goes to transformers' generation."""
    failures = []
    for narrow in (True, False):
        try:
            with torch.inference_mode(), exact_float32():
                return _compare(loaded, narrow=narrow)
        except Exception as error:
            logger.debug("the stand-in (narrow: %s) cannot be run", narrow, exc_info=True)
            failures.append(f"{type(error).__name__}: {error}".splitlines()[0][:MAX_REASON])
    return Proof(f"a small copy of it could not be compared ({failures[-1]})")


def _compare(loaded: LoadedModel, *, narrow: bool) -> Proof:
    small = stand_in(loaded.model, narrow=narrow)
    processor = loaded.processing.processor
    asked = _questions(loaded.processing)
    expected = [_generated(small, processor, messages) for messages in asked]
    ready = dataclasses.replace(
        prepare_model(small, processor, source=loaded.source), is_proven=True, notes=loaded.notes
    )
    error = _error(_answered(ready, asked), expected)
    if error > MAX_ERROR:
        return Proof(f"the engine's mixed batches differ from transformers by {error:.2g} of its logits", error)
    contrast = min(_error(_answered(model, questions), expected) for model, questions in _wrong_runs(ready, asked))
    if contrast < MIN_CONTRAST * MAX_ERROR:
        return Proof("a wrong answer of its small copy would not stand out", error, contrast)
    return Proof(None, error, contrast)


def _wrong_runs(ready: LoadedModel, asked: list[Any]) -> list[tuple[LoadedModel, list[Any]]]:
    """Runs that must not agree: another mask, and another picture in the first request."""
    other = TwoWay.NONE if ready.notes.two_way is not TwoWay.NONE else TwoWay.PROMPT
    masked = dataclasses.replace(ready, notes=dataclasses.replace(ready.notes, two_way=other))
    runs = [(masked, asked)]
    if ready.processing.takes_media:
        runs.append((ready, _questions(ready.processing, seed=1)))
    return runs


def _questions(processing: Processing, seed: int = 0) -> list[Any]:
    """Two requests of different length, the first with two pictures if the model takes them, the second with one.

    A picture comes last, so that the next token sees it in short windows too.
    """
    if not processing.takes_media:
        return [_user(WORDS, WORDS), _user(WORDS)]
    frames = None if processing.takes_pictures else processing.notes.num_frames
    first, second, third = (_shown(*size, seed + index, frames) for index, size in enumerate(PICTURES))
    if processing.notes.one_picture:
        return [_user(first, WORDS, WORDS), _user(WORDS, third)]
    return [_user(first, WORDS, second), _user(WORDS, third)]


def _user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [_part(part) for part in parts]}]


def _part(part: Any) -> dict[str, Any]:
    kind = "text" if isinstance(part, str) else "image" if isinstance(part, Image.Image) else "video"
    return {"type": kind, kind: part}


def _shown(width: int, height: int, seed: int, num_frames: int | None) -> Image.Image | np.ndarray:
    """A picture of noise, or a video of so many frames."""
    frames = np.random.default_rng(seed).integers(0, 256, (num_frames or 1, height, width, 3), dtype=np.uint8)
    return Image.fromarray(frames[0]) if num_frames is None else frames


Answer = tuple[list[int], torch.Tensor]
"""Prompt and generated token ids, and the (NUM_TOKENS, vocab) logits of the latter."""


def _generated(small: Any, processor: Any, messages: Any) -> Answer:
    """transformers' own greedy answer."""
    prompt = Processing(processor, small.config, small.generation_config, whole=True).prepare(messages)
    steps = generation_steps(small, prompt.token_ids, prompt.inputs, NUM_TOKENS)
    ids, logits = list(prompt.token_ids), [next(steps)]
    for _ in range(NUM_TOKENS - 1):
        ids.append(int(logits[-1].argmax()))
        logits.append(steps.send(ids[-1]))
    return [*ids, int(logits[-1].argmax())], torch.stack(logits).cpu()


def _answered(ready: LoadedModel, asked: Sequence[Any]) -> list[Answer]:
    """The engine's answers, in one batch whose steps are shorter than the first prompt."""
    from polylens.engine.engine import Engine  # it asks for the proof, and this runs it

    prompts = [ready.processing.prepare(messages).token_ids for messages in asked]
    longest = max(map(len, prompts)) + NUM_TOKENS
    model = dataclasses.replace(ready, max_model_len=longest)
    config = EngineConfig(max_step_tokens=max(2, longest * 2 // 3), max_running=len(asked), prefix_cache=False)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, return_logits=True)
    engine = Engine(model, config, _AMPLE)
    ids = [engine.add_request(ChatRequest(messages, sampling=sampling)) for messages in asked]
    done = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.error is not None:
                raise output.error
            if output.delta is not None and output.delta.completion is not None:
                done[output.request_id] = output.delta.completion
    engine.close()
    answers = [done[request_id] for request_id in ids]
    return [
        ([*prompt, *answer.token_ids], torch.stack(list(answer.logits or ())))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def _error(actual: Sequence[Answer], expected: Sequence[Answer]) -> float:
    """Largest error of a logit up to the first token that differs, relative to the logits' root mean square; inf for
    other prompts and for what is not finite."""
    worst = 0.0
    for (ids, logits), (right_ids, right_logits) in zip(actual, expected, strict=True):
        if len(ids) != len(right_ids) or ids[:-NUM_TOKENS] != right_ids[:-NUM_TOKENS]:
            return math.inf
        same = [a == b for a, b in zip(ids[-NUM_TOKENS:], right_ids[-NUM_TOKENS:], strict=True)]
        compared = NUM_TOKENS if all(same) else same.index(False) + 1
        error = (logits[:compared] - right_logits[:compared]).abs().max()
        relative = float(error / right_logits.square().mean().sqrt())
        worst = max(worst, relative if math.isfinite(relative) else math.inf)
    return worst
