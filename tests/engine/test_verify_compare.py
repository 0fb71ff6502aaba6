"""The one definition of equal: what it accepts, and that it can say no."""

from __future__ import annotations

import pytest
import torch

from polylens.core import Completion, FinishReason, Usage
from polylens.engine.compare import LOGIT_TOLERANCE, TIE_GAP, compare, merge_comparisons
from polylens.errors import InternalError


def answer(tokens: list[int], logits: list[list[float]] | None = None) -> Completion:
    rows = logits or [[float(token == v) for v in range(4)] for token in tokens]
    return Completion(
        "", tuple(tokens), FinishReason.LENGTH, Usage(1, len(tokens)), logits=tuple(torch.tensor(row) for row in rows)
    )


def test_the_same_answer_is_equal():
    result = compare([answer([1, 2])], [answer([1, 2])])
    assert result.ok
    assert result.tokens_equal
    assert (result.max_logit_error, result.num_ties, result.num_requests) == (0.0, 0, 1)


def test_logits_beyond_the_tolerance_fail_though_the_tokens_agree():
    off = [[0.0, 1.0 + 3 * LOGIT_TOLERANCE, 0.0, 0.0]]
    result = compare([answer([1], off)], [answer([1])])
    assert not result.ok
    assert result.tokens_equal
    assert result.max_logit_error == pytest.approx(3 * LOGIT_TOLERANCE, rel=1e-2)


def test_nan_is_not_equal_to_anything():
    result = compare([answer([1], [[float("nan")] * 4])], [answer([1])])
    assert not result.ok


def test_another_token_without_a_tie_fails():
    result = compare([answer([1, 2])], [answer([1, 3])])
    assert not result.ok
    assert not result.tokens_equal
    assert result.num_ties == 0


def test_an_answer_that_ends_early_fails():
    result = compare([answer([1])], [answer([1, 3])])
    assert not result.ok
    assert not result.tokens_equal


def tied_pair() -> tuple[Completion, Completion]:
    gap = TIE_GAP / 4
    ours = answer([1, 0], [[0.0, 1.0 + gap, 1.0, 0.0], [9.0, 0.0, 0.0, 0.0]])
    theirs = answer([2, 3], [[0.0, 1.0, 1.0 + gap, 0.0], [0.0, 0.0, 0.0, 9.0]])
    return ours, theirs


def test_after_a_tie_nothing_is_compared():
    ours, theirs = tied_pair()
    others = [answer([1])] * 99
    result = compare([ours, *others], [theirs, *others])
    assert result.ok
    assert result.tokens_equal
    assert result.num_ties == 1
    assert result.max_logit_error <= LOGIT_TOLERANCE


def test_too_many_ties_fail():
    ours, theirs = tied_pair()
    result = compare([ours] * 2 + [answer([1])] * 98, [theirs] * 2 + [answer([1])] * 98)
    assert not result.ok
    assert result.num_ties == 2


def test_comparisons_add_up():
    ours, theirs = tied_pair()
    good = compare([answer([1])] * 99, [answer([1])] * 99)
    tied = compare([ours], [theirs])
    assert not tied.ok
    assert merge_comparisons([good, tied]).ok


def test_answers_without_logits_cannot_be_compared():
    bare = Completion("", (1,), FinishReason.LENGTH, Usage(1, 1))
    with pytest.raises(InternalError, match="return_logits"):
        compare([bare], [answer([1])])
