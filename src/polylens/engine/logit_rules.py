"""What a request does to its logits before a token is chosen: constraint, bias, penalties (`SamplingParams`)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from polylens.errors import PolylensError, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from polylens.core import SamplingParams
    from polylens.engine.constraints import ConstraintState


class LogitRules:
    """One answer's rules, and what of the answer they depend on. Made by `start`, told of each token by `accept`."""

    def __init__(self, sampling: SamplingParams, prompt_ids: Seq[int], constraint: ConstraintState | None) -> None:
        self._sampling = sampling
        self._constraint = constraint
        self._bias = dict(sampling.logit_bias)
        self._prompt_ids = frozenset(prompt_ids) if sampling.repetition_penalty != 1 else frozenset()
        self._counts: Counter[int] = Counter()
        """How often the answer has each token."""

    @staticmethod
    def start(
        sampling: SamplingParams, prompt_ids: Seq[int], constraint: ConstraintState | None = None
    ) -> LogitRules | None:
        """The rules of a new answer; None where there are none, as for most requests."""
        penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty - 1)
        if constraint is None and not sampling.logit_bias and not any(penalties):
            return None
        return LogitRules(sampling, prompt_ids, constraint)

    @property
    def ended(self) -> bool:
        """Whether the constraint is complete, and so the answer."""
        return self._constraint is not None and self._constraint.ended

    def apply_(self, logits_v: torch.Tensor) -> None:
        """Change the logits (vocab,) of the next token in place. RequestError: the constraint is too complex."""
        if self._constraint is not None:
            self._constraint.mask_(logits_v)
        if self._bias:
            ids = torch.tensor(list(self._bias), device=logits_v.device)
            logits_v[ids] += logits_v.new_tensor(list(self._bias.values()))
        if self._sampling.repetition_penalty != 1:
            self._penalise_repetition_(logits_v)
        if self._counts and (self._sampling.frequency_penalty or self._sampling.presence_penalty):
            ids = torch.tensor(list(self._counts), device=logits_v.device)
            counts = logits_v.new_tensor(list(self._counts.values()))
            logits_v[ids] -= counts * self._sampling.frequency_penalty + self._sampling.presence_penalty

    def _penalise_repetition_(self, logits_v: torch.Tensor) -> None:
        penalty = self._sampling.repetition_penalty
        ids = torch.tensor(sorted(self._prompt_ids | self._counts.keys()), dtype=torch.long, device=logits_v.device)
        values = logits_v[ids]
        logits_v[ids] = torch.where(values > 0, values / penalty, values * penalty)

    def accept(self, token_id: int) -> None:
        """Count a chosen token in. RequestError: the constraint is too complex."""
        self._counts[token_id] += 1
        if self._constraint is not None:
            self._constraint.accept(token_id)


def ruled_logits(
    logits_sv: torch.Tensor, rules: Seq[LogitRules | None]
) -> tuple[torch.Tensor, dict[int, PolylensError]]:
    """`logits_sv` (sequences, vocab) with each row's rules applied, itself unchanged; and errors by row."""
    ruled = [row for row, rule in enumerate(rules) if rule is not None]
    if not ruled:
        return logits_sv, {}
    logits_sv = logits_sv.clone()
    errors: dict[int, PolylensError] = {}
    for row in ruled:
        rule = rules[row]
        assert rule is not None
        try:
            rule.apply_(logits_sv[row])
        except PolylensError as error:
            errors[row] = error
    return logits_sv, errors


def check_logit_bias(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError where `logit_bias` names an id that the model has no logit for."""
    for token_id in sampling.logit_bias:
        if token_id >= vocab_size:
            raise RequestError(
                f"logit_bias names token id {token_id}; the model has {vocab_size} tokens", param="logit_bias"
            )
