"""The shared nouns. Imports nothing of the project at run time but the error tree.

Shape legend used in names and comments across the project:
t tokens (or rows), d a layer's width, i a layer's input width, o its output width, r rank, h heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from polylens.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch


class Component(StrEnum):
    """The part of a vision-language model a layer belongs to."""

    VISION_TOWER = "vision_tower"
    CONNECTOR = "connector"
    LANGUAGE_MODEL = "language_model"


class LayerKind(StrEnum):
    """How a layer computes; decides which adapter tensors fit it."""

    LINEAR = "linear"
    """An `nn.Linear`: weight (out, in), y = x Wᵀ + b."""
    MATMUL = "matmul"
    """A bare 2-D `nn.Parameter` (in, out) used as y = x W (Gemma 3's projector)."""


@dataclass(frozen=True)
class LayerSpec:
    """One adaptable layer of the loaded model.

    `name` is the module path, as in `model.named_modules()` (for MATMUL: path of the parameter).
    """

    name: str
    component: Component
    kind: LayerKind
    in_features: int
    out_features: int


@dataclass(frozen=True)
class ModelLayers:
    """What adapters need to know of a loaded model: names and shapes, no modules.

    `rename` maps a module path as written by any transformers 4.4x/5.x to this model's path
    (unchanged when no rule applies). `model_type` and `model_class` are for messages.
    `other_modules` are module paths that exist but cannot take a delta (norms, convolutions,
    embeddings): used to say *why* a tensor does not fit.
    """

    specs: Mapping[str, LayerSpec]
    rename: Callable[[str], str]
    model_type: str
    model_class: str
    num_text_layers: int
    other_modules: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Delta:
    """What one adapter adds to one layer: `y += scaling * (x Aᵀ) Bᵀ`.

    a: (rank, in_features), b: (out_features, rank), both contiguous, in the engine's dtype and device.
    """

    layer: str
    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True)
class Digests:
    """Content hashes (hex, 256 bit) of an adapter's tensors and scalings.

    A component without any delta has the digest "" (equal to the base model's), so caches keyed by
    it are shared with the base model. `vision` covers tower and connector together.
    """

    vision_tower: str
    connector: str
    language_model: str
    vision: str
    whole: str


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter: immutable, compared by identity, addressed by content through `digests`."""

    name: str
    source: str
    deltas: Mapping[str, Delta]
    digests: Digests
    num_bytes: int

    @property
    def vision_digest(self) -> str:
        return self.digests.vision

    @property
    def language_digest(self) -> str:
        return self.digests.language_model


class MediaKind(StrEnum):
    IMAGE = "image"
    VIDEO = "video"


@dataclass(frozen=True, eq=False)
class MediaItem:
    """One image or video of a request, decoded.

    image: a PIL image in mode RGB, EXIF orientation applied. video: uint8 array (frames, height, width, 3).
    `key` is a hash of kind, mode, size, every byte and `fps` (hex, 256 bit): equal keys, equal content.
    `fps`: frames per second of the frames as given, or None if unknown.
    """

    kind: MediaKind
    data: Any
    key: str
    fps: float | None = None


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. Greedy by default.

    temperature 0 is greedy. top_p in (0, 1]; top_k 0 is off; min_p in [0, 1). `seed` makes a request's
    draws independent of its batch mates. `logprobs`: None, or how many top alternatives to return per
    token (0: the chosen token only). `return_logits` keeps each step's raw float32 logits (vocab,) on
    the CPU: for tests and `verify`. `ignore_eos` generates `max_tokens` tokens regardless of stop ids.
    A request also ends (finish reason "length") where prompt and answer fill the model's context.
    Raises RequestError for a value out of range, naming it.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False
    return_logits: bool = False

    def __post_init__(self) -> None:
        _check(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _check(0.0 <= self.temperature < math.inf, "temperature", self.temperature, "0 (greedy) or more")
        _check(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1")
        _check(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _check(0.0 <= self.min_p < 1.0, "min_p", self.min_p, "at least 0 and below 1")
        _check(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "None or in [0, 2**63)")
        _check(self.logprobs is None or self.logprobs >= 0, "logprobs", self.logprobs, "None, 0 or more")
        _check(all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "a tuple of non-empty strings")
        _check(not isinstance(self.stop, str), "stop", self.stop, "a tuple of strings, not one string")


def _check(ok: bool, param: str, value: object, wanted: str) -> None:
    if not ok:
        raise RequestError(f"{param} must be {wanted}, got {value!r}", param=param)


@dataclass(frozen=True)
class ChatRequest:
    """One conversation to answer.

    messages: OpenAI-style dicts; content is a string or a list of parts `{"type": "text", "text"}`,
    `{"type": "image", "image": PIL image | path}`, `{"type": "video", "video": path | list of PIL
    images | uint8 array, "fps": optional}`. adapter: a loaded adapter's name, or None for the base.
    """

    messages: Sequence[Mapping[str, Any]]
    adapter: str | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class Usage:
    """Token counts of one request. `cached_tokens`: prompt tokens whose KV came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of a chosen token, and of the `logprobs` most likely alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Completion:
    """The answer to one request. `logits`: per generated token (vocab,) float32 if asked for."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    adapter: str | None = None
    request_id: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None
    matched_stop: str | int | None = None


@dataclass(frozen=True)
class CompletionDelta:
    """One step of a streamed answer: the new text and tokens, and the completion when it is the last."""

    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None = None
