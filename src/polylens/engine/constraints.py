"""Answers held to a form (`core.Constraint`), token by token, through llguidance.

Chosen over xgrammar: it needs no torch of its own, computes a mask when it is asked for instead of compiling the
whole vocabulary first, and takes every fast tokenizer as it is, byte-level or with byte fallback.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from polylens.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polylens.core import Constraint

MAX_CONSTRAINT_CHARS = 32 * 1024
"""Longest pattern, schema or list of choices: one of this length takes about a second to compile."""

NUM_KEPT_GRAMMARS = 64
"""Compiled constraints kept for requests that repeat them: applications send few, and the same ones."""

JSON_WHITESPACE = r"(\n[ \t]{0,64}|[ ]?)"
"""Between JSON tokens: nothing, a space, or a line break with indentation. Without a bound, a model that is unsure
fills its whole answer with blanks."""


class ConstraintState:
    """How far one answer has come in its form."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> ConstraintState:
        """An independent state, equally far."""
        return ConstraintState(self._matcher.deep_copy())

    @property
    def ended(self) -> bool:
        """Whether the form is complete, so that no token may follow."""
        return self._matcher.is_stopped()

    def mask_(self, logits_v: torch.Tensor) -> None:
        """Set the logits (vocab,) of tokens that may not come next to -inf, in place. RequestError: too complex."""
        allowed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed_v = torch.from_numpy(np.unpackbits(allowed, bitorder="little", count=len(logits_v)))
        logits_v.masked_fill_((allowed_v == 0).to(logits_v.device), float("-inf"))

    def accept(self, token_id: int) -> None:
        """Go on past a token that the mask allowed. RequestError: too complex."""
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"the constraint cannot be held: {_first_line(self._matcher)}", param="constraint")


class Constraints:
    """Starts constraints for one model's tokenizer. Thread-safe; the tokenizer is taken in at the first one.

    vocab_size: width of the logits. eos_token_ids: the ids that may end an answer where its form allows it.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, len(tokenizer))
        self._eos_token_ids = [token_id for token_id in eos_token_ids if token_id < self._vocab_size]
        self._lock = threading.Lock()
        self._taken_in: Any = None
        self._kept: OrderedDict[str, ConstraintState] = OrderedDict()

    def start(self, constraint: Constraint) -> ConstraintState:
        """The state before the first token. May take a second; raises RequestError for what cannot be held."""
        grammar = _grammar(constraint)
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
                return self._kept[grammar].copy()
            if self._taken_in is None:
                self._taken_in = from_tokenizer(self._tokenizer, self._vocab_size, self._eos_token_ids or None)
        state = self._compile(grammar, constraint)
        with self._lock:
            self._kept[grammar] = state
            if len(self._kept) > NUM_KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        return state.copy()

    def _compile(self, grammar: str, constraint: Constraint) -> ConstraintState:
        matcher = LLMatcher(self._taken_in, grammar, log_level=0)
        if not matcher.is_error():
            # The first mask is the dearest, and shows what is too complex before the request is queued.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise RequestError(
                f"the {constraint.kind} constraint cannot be held: {_first_line(matcher)}", param="constraint"
            )
        return ConstraintState(matcher)


def _grammar(constraint: Constraint) -> str:
    if constraint.kind == "json_object":
        return _json_grammar({"type": "object"})
    if constraint.kind == "json_schema":
        return _json_grammar(constraint.value)
    pattern = "|".join(map(_literal, constraint.value)) if constraint.kind == "choice" else constraint.value
    return LLMatcher.grammar_from_regex(_of_bounded_length(pattern))


def _json_grammar(schema: dict[str, Any]) -> str:
    try:
        text = json.dumps(schema)
        overrides = {"whitespace_pattern": JSON_WHITESPACE, "whitespace_flexible": True, "lenient": False}
        return LLMatcher.grammar_from_json_schema(_of_bounded_length(text), overrides=overrides)  # type: ignore[arg-type]
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the json_schema constraint is not a JSON schema: {error}", param="constraint") from error


def _literal(text: str) -> str:
    """A pattern of just this text. Every character by its number: no rule of escaping to get wrong."""
    return "".join(f"\\x{{{ord(char):x}}}" for char in text)


def _of_bounded_length(text: str) -> str:
    if len(text) > MAX_CONSTRAINT_CHARS:
        raise RequestError(
            f"the constraint has {len(text)} characters; at most {MAX_CONSTRAINT_CHARS} are taken", param="constraint"
        )
    return text


def _first_line(matcher: LLMatcher) -> str:
    lines = [line.strip() for line in matcher.get_error().splitlines() if line.strip()]
    # llguidance shows a pattern that fails over several lines, the reason in the last one that says "error".
    reasons = [line for line in lines if line.startswith("error:")]
    return (reasons or lines or ["it is in error"])[-1 if reasons else 0]
