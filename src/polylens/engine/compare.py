"""The project's one definition of equal answers.

GEMM results differ by about 1e-6 with the number of rows in a batch, so two right runs of the same request
are not bitwise equal. They count as equal when, in float32, every logit agrees within LOGIT_TOLERANCE up to
and at the first differing token, and the greedy tokens are the same, except after a tie: where the two best
logits of the reference are closer than TIE_GAP either may win, and what follows is not compared. More than
MAX_TIE_FRACTION of requests with such a tie fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from polylens.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polylens.core import Completion

LOGIT_TOLERANCE = 1e-4
"""Largest difference between two logits, in float32, that counts as equal."""

TIE_GAP = 2e-4
"""Twice the tolerance: two best logits closer than this may change places within it."""

MAX_TIE_FRACTION = 0.01
"""Ties that change a token are rare; more of them than this are an error in disguise."""


@dataclass(frozen=True)
class Comparison:
    """How answers differ from their reference.

    tokens_equal: every request's tokens are the same, or differ first at a tie. num_ties: requests whose
    tokens differ first at a tie. differences: one line for each request that is not equal.
    """

    num_requests: int
    max_logit_error: float
    tokens_equal: bool
    num_ties: int
    differences: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the answers are equal, by the definition above."""
        return not self.differences and self.num_ties <= MAX_TIE_FRACTION * self.num_requests


def compare(actual: Sequence[Completion], expected: Sequence[Completion]) -> Comparison:
    """Compare answers with their reference, request by request.

    Both must be greedy, float32, generated with `return_logits`, and in the same order.
    """
    if len(actual) != len(expected):
        raise InternalError(f"cannot compare {len(actual)} answers with {len(expected)}")
    pairs = [_compare_one(*pair) for pair in zip(actual, expected, strict=True)]
    differences = tuple(f"request {index}: {pair.problem}" for index, pair in enumerate(pairs) if pair.problem)
    return Comparison(
        num_requests=len(pairs),
        max_logit_error=max((pair.logit_error for pair in pairs), default=0.0),
        tokens_equal=all(pair.tokens_equal for pair in pairs),
        num_ties=sum(pair.tie for pair in pairs),
        differences=differences,
    )


def merge_comparisons(parts: Sequence[Comparison]) -> Comparison:
    """One comparison over the requests of all `parts`."""
    return Comparison(
        num_requests=sum(part.num_requests for part in parts),
        max_logit_error=max((part.max_logit_error for part in parts), default=0.0),
        tokens_equal=all(part.tokens_equal for part in parts),
        num_ties=sum(part.num_ties for part in parts),
        differences=tuple(line for part in parts for line in part.differences),
    )


@dataclass(frozen=True)
class _Pair:
    logit_error: float
    tokens_equal: bool
    tie: bool
    problem: str


def _compare_one(actual: Completion, expected: Completion) -> _Pair:
    ours, theirs = _logits(actual), _logits(expected)
    first = _first_difference(actual.token_ids, expected.token_ids)
    # Up to and at the first difference both were computed from the same tokens.
    compared = min(len(ours), len(theirs)) if first is None else min(first + 1, len(ours), len(theirs))
    error = _largest_difference(ours[:compared], theirs[:compared])
    problem = "" if error <= LOGIT_TOLERANCE else f"logits differ by {error:.3g}, allowed {LOGIT_TOLERANCE:g}"
    if first is None:
        return _Pair(error, True, False, problem)
    tie = first < len(theirs) and _top_gap(theirs[first]) < TIE_GAP
    if not tie:
        problem = problem or f"tokens differ from token {first} on, without a tie"
    return _Pair(error, tie, tie, problem)


def _logits(completion: Completion) -> Sequence[torch.Tensor]:
    if completion.logits is None or len(completion.logits) != len(completion.token_ids):
        raise InternalError("answers to compare must be generated with return_logits")
    return completion.logits


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs, or where the shorter one ends; None if equal."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def _largest_difference(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    errors = [float((x.float() - y.float()).abs().max()) for x, y in zip(a, b, strict=True)]
    # NaN compares as False with everything: it must not look like a small error.
    return float("inf") if any(error != error for error in errors) else max(errors, default=0.0)


def _top_gap(logits_v: torch.Tensor) -> float:
    best, second = torch.topk(logits_v.float(), 2).values.tolist()
    return best - second
