"""How the tokens of an answer are chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from polylens.core.checks import check, check_integer, check_number
from polylens.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


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

_RANGES: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: value >= 0.0, "0 (greedy) or more"),
    "top_p": (lambda value: 0.0 < value <= 1.0, "above 0 and at most 1"),
    "min_p": (lambda value: 0.0 <= value < 1.0, "at least 0 and below 1"),
    "presence_penalty": (lambda value: -2.0 <= value <= 2.0, "-2 to 2"),
    "frequency_penalty": (lambda value: -2.0 <= value <= 2.0, "-2 to 2"),
    "repetition_penalty": (
        lambda value: MIN_REPETITION_PENALTY <= value <= MAX_REPETITION_PENALTY,
        f"{MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}",
    ),
}
"""Of the parameters that are plain numbers: what they may be."""


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
        for name, (in_range, wanted) in _RANGES.items():
            check_number(name, getattr(self, name), in_range, wanted)
        check_integer("max_tokens", self.max_tokens, 1)
        check_integer("top_k", self.top_k, 0)
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, 0)
        if self.seed is not None:
            check_integer("seed", self.seed, 0)
            check(self.seed < 2**63, "seed", self.seed, "below 2**63")
        is_constraint = self.constraint is None or isinstance(self.constraint, Constraint)
        check(is_constraint, "constraint", self.constraint, "a Constraint")
        self._check_logit_bias()
        self._check_stops()

    def _check_stops(self) -> None:
        check(isinstance(self.stop, tuple | list), "stop", self.stop, "a tuple of strings")
        check(all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "a tuple of non-empty strings")
        ids = self.stop_token_ids
        check(isinstance(ids, tuple | list), "stop_token_ids", ids, "a tuple of token ids")
        for token_id in ids:
            check_integer("stop_token_ids", token_id, 0)

    def _check_logit_bias(self) -> None:
        check(isinstance(self.logit_bias, dict), "logit_bias", self.logit_bias, "a dict of token id to bias")
        for token_id, bias in self.logit_bias.items():
            check_integer("logit_bias", token_id, 0)
            check_number("logit_bias", bias, lambda value: -100.0 <= value <= 100.0, "-100 to 100")
