"""The shared nouns. Imports nothing of the project at run time but the error tree.

Shape legend used in names and comments across the project:
t tokens (or rows), d a layer's width, i a layer's input width, o its output width, r rank, h heads.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from polylens.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch


BASE_NAME = "base"
"""What commands call the model without an adapter; no adapter may take this name."""


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
    CONV = "conv"
    """A patch embedding: an `nn.Conv2d` or `nn.Conv3d` whose stride is its kernel, so a linear layer over patches.

    in_features: values of one patch. One row is one leading index of its input: a patch, or a whole tile."""
    NORM = "norm"
    """A norm with a weight (width,) and perhaps a bias; each row by itself."""
    HEAD_NORM = "head_norm"
    """A norm of another width inside the text model (of queries and keys, head by head); rows are tokens."""
    EMBEDDING = "embedding"
    """The token embedding (in_features: the vocabulary); rows are token ids."""
    EXPERTS = "experts"
    """One bare 3-D `nn.Parameter` (experts, out, in) of a mixture: rows are tokens, each seen by its own experts."""
    EXPERTS_IN_FIRST = "experts_in_first"
    """The same, stored (experts, in, out) and used as y = x W (Aria, Llama 4)."""
    ROUTER = "router"
    """What chooses a token's experts: a weight (experts, width) in a module that is no plain `nn.Linear`."""

    SHARED = "shared"
    """Any other parameter of the tower, of which all items of a batch share the values (position embeddings)."""


FACTOR_KINDS = frozenset(LayerKind) - {LayerKind.NORM, LayerKind.HEAD_NORM, LayerKind.SHARED}
"""Kinds of layer that take factors A and B; others can only be replaced."""

EXPERT_KINDS = frozenset({LayerKind.EXPERTS, LayerKind.EXPERTS_IN_FIRST})
"""Kinds of layer that hold one weight for each expert."""

BARE_KINDS = frozenset({LayerKind.MATMUL, LayerKind.SHARED}) | EXPERT_KINDS
"""Kinds of layer that are a parameter of a module themselves."""


@dataclass(frozen=True)
class LayerSpec:
    """One adaptable layer of the loaded model.

    `name` is the module path, as in `model.named_modules()` (for `BARE_KINDS`: path of the parameter).
    num_experts: of EXPERT_KINDS, whose features are those of one expert.
    """

    name: str
    component: Component
    kind: LayerKind
    in_features: int
    out_features: int
    num_experts: int = 1


@dataclass(frozen=True)
class ModelLayers:
    """What adapters need to know of a loaded model: names and shapes, no modules.

    `rename` maps a module path as written by any transformers 4.4x/5.x to this model's path
    (unchanged when no rule applies). `model_type` and `model_class` are for messages.
    `other_modules` are module paths that exist but cannot take a delta: used to say *why* a tensor does not fit.
    `parameters` are the base model's own tensors by name (on the meta device where only a config was read):
    what DoRA's norms and new biases are computed against. `source`: where the model was loaded from, if known.
    `more_tokens`: whether an adapter may bring embeddings and head of more tokens than the model has.
    """

    specs: Mapping[str, LayerSpec]
    rename: Callable[[str], str]
    model_type: str
    model_class: str
    num_text_layers: int
    other_modules: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    source: str = ""
    more_tokens: bool = False


@dataclass(frozen=True)
class Delta:
    """What one adapter adds to one layer: `y += scaling * (x Aᵀ) Bᵀ`.

    a: (rank, in_features), b: (out_features, rank), both contiguous, in the engine's dtype and device; for EXPERT_KINDS
    with one dimension more in front, the expert's index.
    """

    layer: str
    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by field name; `with_tensors` puts others in their place."""
        return {"a": self.a, "b": self.b}


@dataclass(frozen=True)
class ScaledDelta(Delta):
    """A delta that also scales the layer's outputs (DoRA) or shifts them (a new bias):

        y = scale_o ⊙ (y_base + scaling · (x Aᵀ) Bᵀ) + shift_o

    y_base includes the base layer's bias. scale_o, shift_o: (out_features,), None where nothing is to be done.
    """

    scale_o: torch.Tensor | None = None
    shift_o: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        optional = {"scale_o": self.scale_o, "shift_o": self.shift_o}
        return super().tensors() | {name: x for name, x in optional.items() if x is not None}


@dataclass(frozen=True)
class Replacement:
    """Parameters of one layer that take the place of the base model's, on the adapter's rows (`modules_to_save`).

    weight: as the base layer's own, None to keep that; bias likewise. Of the token embedding and the head, weight may
    have more rows, for tokens that the base model does not have.
    """

    layer: str
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        return 0

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by field name, which is also the parameter's name."""
        return {name: x for name, x in (("weight", self.weight), ("bias", self.bias)) if x is not None}


@dataclass(frozen=True)
class TokenRows:
    """Rows of the embedding (or, where it is tied, of the head) that take the place of the base model's.

    rows_nd: (n, width), the new rows of `token_ids` (n ascending ids).
    """

    layer: str
    token_ids: tuple[int, ...]
    rows_nd: torch.Tensor

    @property
    def rank(self) -> int:
        return 0

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"rows_nd": self.rows_nd}


Change = Delta | Replacement | TokenRows
"""What one adapter does to one layer. `type(change) is Delta`: the plain factors that the fast path knows."""


def with_tensors(change: Change, tensors: Mapping[str, torch.Tensor]) -> Change:
    """`change` with other tensors, by the names that `change.tensors()` has."""
    return replace(change, **tensors)  # type: ignore[arg-type]  # mypy knows no fields of a union


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


@dataclass(frozen=True)
class ProcessingFiles:
    """What an adapter's folder says about how its requests become tokens and pixels.

    settings: JSON objects by file name (`preprocessor_config.json`, …). tokenizer: contents by file name.
    template: the chat template. digest: a hash of all that (hex, 256 bit).
    """

    settings: Mapping[str, Mapping[str, Any]]
    tokenizer: Mapping[str, bytes]
    template: str | None
    digest: str


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter: immutable, compared by identity, addressed by content through `content`."""

    name: str
    source: str
    deltas: Mapping[str, Change]
    digests: Digests
    num_bytes: int
    special: bool = False
    """Whether any of `deltas` is more than plain factors of a linear layer."""
    undivided: bool = False
    """Whether any of `deltas` changes what all items of an encoder batch share: there it runs alone."""
    processing: Any = None
    """The `models.processing.Processing` of its requests where its folder brings one; None: the base model's."""
    processing_digest: str = ""
    """Hash of the files that `processing` was made of; "" where it is the base model's."""
    num_more_tokens: int = 0
    """Tokens beyond the base model's vocabulary, of which it brings embeddings and logits."""

    @property
    def content(self) -> tuple[Digests, str]:
        """Equal for adapters that do the same to every request."""
        return self.digests, self.processing_digest

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
class Constraint:
    """A form that a whole answer must have, held token by token. The request ends when the form is complete.

    kind "json_object": any JSON object. "json_schema": `value` is the JSON schema (keywords that cannot be held
    are refused when the request is prepared). "regex": `value` is a pattern of the whole answer, without
    look-around and back-references. "choice": `value` is a tuple of strings, one of which is the answer.
    An answer cut at `max_tokens` is a beginning of such a form. Raises RequestError.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice"]
    value: Any = None

    def __post_init__(self) -> None:
        wanted = _CONSTRAINT_VALUES.get(self.kind) if isinstance(self.kind, str) else None
        if wanted is None:
            raise RequestError(
                f"constraint.kind must be one of {', '.join(_CONSTRAINT_VALUES)}, got {self.kind!r}", param="constraint"
            )
        check, description = wanted
        if not check(self.value):
            raise RequestError(
                f"a {self.kind} constraint takes {description}, got {self.value!r:.200}", param="constraint"
            )


def _are_choices(value: Any) -> bool:
    return isinstance(value, tuple | list) and bool(value) and all(isinstance(one, str) and one for one in value)


_CONSTRAINT_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "json_object": (lambda value: value is None, "no value"),
    "json_schema": (lambda value: isinstance(value, dict), "a JSON schema, as a dict"),
    "regex": (lambda value: isinstance(value, str) and bool(value), "a pattern, as a non-empty string"),
    "choice": (_are_choices, "a tuple of one or more non-empty strings"),
}


MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 1e6
"""Beyond these, penalised logits would leave float32; at these, a token is as good as certain, or never chosen."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. Greedy by default.

    temperature 0 is greedy. top_p in (0, 1]; top_k 0 is off; min_p in [0, 1). `seed` makes a request's
    draws independent of its batch mates. `logprobs`: None, or how many top alternatives to return per
    token (0: the chosen token only); they are those of the raw logits, before all that follows.
    `return_logits` keeps each step's raw float32 logits (vocab,) on the CPU: for tests and `verify`.
    `ignore_eos` generates `max_tokens` tokens regardless of stop ids.

    What changes the logits, in this order: `constraint` (see `Constraint`); `logit_bias` adds to the logits of
    token ids, -100 to 100; `repetition_penalty` (1e-6 to 1e6) divides positive and multiplies negative logits of
    tokens that prompt or answer hold; `frequency_penalty` is subtracted once for each time the answer has the
    token, and `presence_penalty` once if it has it (both -2 to 2).

    A request also ends (finish reason "length") where prompt and answer fill the context (`LLM.engine.max_model_len`).
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        _check_integer("max_tokens", self.max_tokens, 1)
        _check_number("temperature", self.temperature, lambda value: value >= 0.0, "0 (greedy) or more")
        _check_number("top_p", self.top_p, lambda value: 0.0 < value <= 1.0, "above 0 and at most 1")
        _check_integer("top_k", self.top_k, 0)
        _check_number("min_p", self.min_p, lambda value: 0.0 <= value < 1.0, "at least 0 and below 1")
        _check_number("presence_penalty", self.presence_penalty, lambda value: -2.0 <= value <= 2.0, "-2 to 2")
        _check_number("frequency_penalty", self.frequency_penalty, lambda value: -2.0 <= value <= 2.0, "-2 to 2")
        low, high = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        _check_number(
            "repetition_penalty", self.repetition_penalty, lambda value: low <= value <= high, f"{low:g} to {high:g}"
        )
        self._check_logit_bias()
        is_constraint = self.constraint is None or isinstance(self.constraint, Constraint)
        _check(is_constraint, "constraint", self.constraint, "a Constraint")
        if self.seed is not None:
            _check_integer("seed", self.seed, 0)
            _check(self.seed < 2**63, "seed", self.seed, "below 2**63")
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0)
        _check(isinstance(self.stop, tuple | list), "stop", self.stop, "a tuple of strings")
        _check(all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "a tuple of non-empty strings")
        _check(
            isinstance(self.stop_token_ids, tuple | list), "stop_token_ids", self.stop_token_ids, "a tuple of token ids"
        )
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, 0)

    def _check_logit_bias(self) -> None:
        _check(isinstance(self.logit_bias, dict), "logit_bias", self.logit_bias, "a dict of token id to bias")
        for token_id, bias in self.logit_bias.items():
            _check_integer("logit_bias", token_id, 0)
            _check_number("logit_bias", bias, lambda value: -100.0 <= value <= 100.0, "-100 to 100")


def _check(ok: bool, param: str, value: object, wanted: str) -> None:
    if not ok:
        raise RequestError(f"{param} must be {wanted}, got {value!r:.200}", param=param)


def is_finite(value: float) -> bool:
    """Whether a float can hold `value`: an int of 400 digits cannot (`math.isfinite` raises OverflowError for it)."""
    return abs(value) <= sys.float_info.max


def _check_integer(param: str, value: object, low: int) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= low
    _check(ok, param, value, f"an integer of at least {low}")


def _check_number(param: str, value: object, in_range: Callable[[float], bool], wanted: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value)
    _check(is_number and in_range(value), param, value, f"a number, {wanted}")  # type: ignore[arg-type]


@dataclass(frozen=True)
class ChatRequest:
    """One conversation to answer.

    messages: OpenAI-style dicts; content is a string or a list of parts `{"type": "text", "text"}`,
    `{"type": "image", "image": PIL image | path}`, `{"type": "video", "video": path | list of PIL
    images | uint8 array, "fps": optional}`. adapter: a loaded adapter's name, or None for the base.
    chat_template_kwargs: variables of the model's chat template. mm_processor_kwargs: `min_pixels`, `max_pixels`,
    `fps`, `num_frames` (see `models.media_settings`). cache_salt: what the request computes is found again in
    prefix and vision cache only by requests with the same salt.
    """

    messages: Sequence[Mapping[str, Any]]
    adapter: str | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        _check_request(self)


@dataclass(frozen=True)
class TextRequest:
    """A prompt to go on from, without chat template and media: text (typed control tokens bind nothing) or token ids.

    The rest as in `ChatRequest`.
    """

    prompt: str | Sequence[int]
    adapter: str | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        _check_request(self)


Request = ChatRequest | TextRequest


def _check_request(request: Request) -> None:
    """Raise RequestError for a field of another kind; messages and prompt are checked when they are read."""
    for name in ("adapter", "request_id", "cache_salt"):
        value = getattr(request, name)
        _check(value is None or (isinstance(value, str) and bool(value)), name, value, "a non-empty string, or None")
    _check(isinstance(request.sampling, SamplingParams), "sampling", request.sampling, "a SamplingParams")
    for name in ("chat_template_kwargs", "mm_processor_kwargs"):
        value = getattr(request, name, None)
        _check(value is None or isinstance(value, MappingABC), name, value, "a dict, or None")


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


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
    """One step of a streamed answer: the new text and tokens, and the completion when it is the last.

    logprobs: of `token_ids`, if asked for. A token's text may come with a later step than the token itself.
    """

    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
