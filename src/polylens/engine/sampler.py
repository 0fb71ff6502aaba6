"""From logits to tokens, for all sequences of a step at once.

A request's own rules come first (`logit_rules`). Then the filters, in the order that Transformers' `generate`
has: temperature, then top_k, then top_p over what top_k left, then min_p over what top_p left. Each token takes
one uniform draw from the request's own generator, so what a request draws does not depend on its batch mates.
Log-probabilities are those of the raw logits: before rules, temperature and filters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from polylens.core import TokenLogprob
from polylens.engine.logit_rules import ruled_logits
from polylens.errors import InternalError, PolylensError

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from polylens.core import SamplingParams
    from polylens.engine.logit_rules import LogitRules

SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny
"""Positive temperatures that float32 rounds to 0 count as this: only exact ties with the largest logit remain."""

LARGEST_TEMPERATURE = torch.finfo(torch.float32).max
"""Temperatures beyond float32 count as this: all tokens are as likely, but those at -inf stay out."""


NUM_CANDIDATES = 1024
"""Tokens looked at before all are sorted: more than a usual top_p or top_k leaves. At 152 000 tokens a row takes a
small part of a full sort's time."""


@dataclass(frozen=True)
class Sampled:
    """A chosen token; `logprob` if the request asked for logprobs."""

    token_id: int
    logprob: TokenLogprob | None


def make_generator(params: SamplingParams) -> torch.Generator | None:
    """The request's own source of draws, on the CPU whatever the device: from its seed, or from the system's
    randomness without one. None for a greedy request."""
    if params.temperature == 0:
        return None
    generator = torch.Generator()
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed)
    return generator


class Sampler:
    """Chooses the next token of every sequence of a step."""

    def sample(
        self,
        logits_sv: torch.Tensor,
        params: Seq[SamplingParams],
        generators: Seq[torch.Generator | None],
        rules: Seq[LogitRules | None] | None = None,
    ) -> list[Sampled | PolylensError]:
        """One result per row of `logits_sv` (sequences, vocab), float, unchanged by this.

        `params`, `generators` (`make_generator`) and `rules` (`LogitRules.start`, told of the chosen token here)
        belong to the rows in order. A row that is not a distribution (NaN, +inf, or nothing above -inf) gives an
        InternalError in its place, one whose rules cannot go on their error; the others are not affected.
        """
        if not params:
            return []
        rules = rules if rules is not None else [None] * len(params)
        raw_sv = logits_sv.float()
        logits_sv, errors = ruled_logits(raw_sv, rules)
        # Of the raw logits too: a rule may have put -inf where the model gave NaN.
        valid = torch.isfinite(logits_sv.amax(dim=-1)) & torch.isfinite(raw_sv.amax(dim=-1))
        chosen = logits_sv.argmax(dim=-1)
        drawing = [row for row, one in enumerate(params) if one.temperature > 0]
        if drawing:
            rows = torch.tensor(drawing, device=logits_sv.device)
            chosen[rows] = _draw(
                logits_sv[rows], [params[row] for row in drawing], [generators[row] for row in drawing]
            )
        logprobs = _logprobs(raw_sv, chosen, params)
        return [
            errors.get(row) or _result(token, logprobs.get(row), ok, rules[row])
            for row, (token, ok) in enumerate(zip(chosen.tolist(), valid.tolist(), strict=True))
        ]


def _result(
    token_id: int, logprob: TokenLogprob | None, valid: bool, rule: LogitRules | None
) -> Sampled | PolylensError:
    if not valid:
        return InternalError("the model gave logits that are not finite")
    try:
        if rule is not None:
            rule.accept(token_id)
    except PolylensError as error:
        return error
    return Sampled(token_id, logprob)


def _draw(
    logits_sv: torch.Tensor, params: Seq[SamplingParams], generators: Seq[torch.Generator | None]
) -> torch.Tensor:
    """Token ids (s,), one draw a row, from the filtered distributions."""
    draws_s = torch.tensor([_uniform(generator) for generator in generators], dtype=torch.float64).to(logits_sv.device)
    temperature_s = logits_sv.new_tensor([one.temperature for one in params]).clamp(
        SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE
    )
    # Shifting by the largest logit first keeps very low temperatures from overflowing.
    logits_sv = (logits_sv - logits_sv.amax(dim=-1, keepdim=True)) / temperature_s[:, None]
    chosen = torch.empty(len(params), dtype=torch.long, device=logits_sv.device)
    # Whether a row is sorted may depend on its own parameters only: the order of the tokens decides which of
    # them a draw means.
    filtered = [one.top_k > 0 or one.top_p < 1 or one.min_p > 0 for one in params]
    for sort in (False, True):
        group = [row for row, value in enumerate(filtered) if value is sort]
        if group:
            rows = torch.tensor(group, device=logits_sv.device)
            logits, draws = logits_sv[rows], draws_s[rows]
            asked = [params[row] for row in group]
            chosen[rows] = _pick_filtered(logits, draws, asked) if sort else _pick(logits, draws)
    return chosen


def _uniform(generator: torch.Generator | None) -> float:
    if generator is None:
        raise InternalError("a request that samples has no generator")
    return float(torch.rand((), dtype=torch.float64, generator=generator))


def _pick(logits_sv: torch.Tensor, draws_s: torch.Tensor) -> torch.Tensor:
    return _invert(logits_sv.softmax(dim=-1), draws_s)


def _pick_filtered(logits_sv: torch.Tensor, draws_s: torch.Tensor, params: Seq[SamplingParams]) -> torch.Tensor:
    probs_sv = logits_sv.softmax(dim=-1)
    filters = Filters.of(params, logits_sv)
    # Few tokens pass the filters as a rule, and the most probable few are found much faster than all are sorted.
    chosen_s, certain_s = _pick_among(probs_sv, min(NUM_CANDIDATES, probs_sv.shape[-1]), draws_s, filters)
    unsure = (~certain_s).nonzero()[:, 0]
    if len(unsure):
        chosen_s[unsure], _ = _pick_among(probs_sv[unsure], probs_sv.shape[-1], draws_s[unsure], filters.rows(unsure))
    return chosen_s


def _pick_among(
    probs_sv: torch.Tensor, num_candidates: int, draws_s: torch.Tensor, filters: Filters
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw among the most probable `num_candidates` tokens: the ids (s,), and whether no other token could pass
    the filters (s,). That depends on the row alone, never on its batch mates."""
    top_sc, ids_sc = probs_sv.topk(num_candidates, dim=-1)
    rest_s = probs_sv.sum(dim=-1) - top_sc.sum(dim=-1) if num_candidates < probs_sv.shape[-1] else draws_s.new_zeros(())
    kept_sc, certain_s = filter_sorted(top_sc, rest_s.expand(len(draws_s)).to(top_sc.dtype), filters)
    certain_s = certain_s | (num_candidates == probs_sv.shape[-1])
    return ids_sc.gather(-1, _invert(kept_sc, draws_s)[:, None])[:, 0], certain_s


@dataclass(frozen=True)
class Filters:
    """The filters of some rows as columns (rows, 1). top_k 0, top_p 1 and min_p 0 are off."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @staticmethod
    def of(params: Seq[SamplingParams], like: torch.Tensor) -> Filters:
        return Filters(
            top_k=torch.tensor([[min(one.top_k, like.shape[-1])] for one in params], device=like.device),
            top_p=like.new_tensor([[one.top_p] for one in params]),
            min_p=like.new_tensor([[one.min_p] for one in params]),
        )

    def rows(self, index: torch.Tensor) -> Filters:
        return Filters(self.top_k[index], self.top_p[index], self.min_p[index])


def filter_sorted(probs_sc: torch.Tensor, rest_s: torch.Tensor, filters: Filters) -> tuple[torch.Tensor, torch.Tensor]:
    """`probs_sc` with zeros for what the filters remove, not rescaled; and per row whether the rest is removed too.

    probs_sc (rows, candidates): the most probable tokens' probabilities, descending. rest_s (rows,): the
    probability of all others together. top_k: keep the first k. top_p: of what top_k left, rescaled to sum 1, keep
    the fewest that reach p together. min_p: keep those of at least min_p times the largest. The most probable
    token always stays.
    """
    ranks_c = torch.arange(probs_sc.shape[-1], device=probs_sc.device)
    by_rank = filters.top_k > 0
    left_sc = probs_sc * ((ranks_c < filters.top_k) | ~by_rank)
    sums_sc = left_sc.cumsum(dim=-1)
    total_s1 = sums_sc[:, -1:] + rest_s[:, None] * ~by_rank
    before_sc = torch.nn.functional.pad(sums_sc[:, :-1], (1, 0))
    # top_p 1 keeps all, whatever the rounding of the sums.
    in_top_p = (before_sc < filters.top_p * total_s1) | (filters.top_p == 1)
    least_s1 = filters.min_p * left_sc[:, :1]
    kept_sc = left_sc * ((in_top_p & (left_sc >= least_s1)) | (ranks_c == 0))
    # A larger top_k makes the total uncertain, so there top_p and min_p alone decide nothing.
    few = by_rank & (filters.top_k <= probs_sc.shape[-1])
    reached = (filters.top_p < 1) & (sums_sc[:, -1:] >= filters.top_p * total_s1)
    below = left_sc[:, -1:] < least_s1
    return kept_sc, (few | (~by_rank & (reached | below)))[:, 0]


def _invert(weights_sv: torch.Tensor, draws_s: torch.Tensor) -> torch.Tensor:
    """The index in each row where the running sum of its weights passes draw × total; draws in [0, 1)."""
    # float64: draws come from a vocabulary of 10^5 and more, of which float32 sums would lose the rare ones.
    sums_sv = weights_sv.double().cumsum(dim=-1)
    total_s = sums_sv[:, -1]
    # Rounding may put draw × total on the total itself, which no running sum passes.
    target_s = (draws_s * total_s).minimum(total_s.nextafter(torch.zeros_like(total_s)))
    index_s = torch.searchsorted(sums_sv, target_s[:, None], right=True)[:, 0]
    # Only a row that is not finite (reported by the caller) can still be past its end.
    return index_s.clamp(max=weights_sv.shape[-1] - 1)


def _logprobs(logits_sv: torch.Tensor, chosen_s: torch.Tensor, params: Seq[SamplingParams]) -> dict[int, TokenLogprob]:
    """By row, for the rows that ask for it. Natural logarithms, from the raw logits."""
    asking = [row for row, one in enumerate(params) if one.logprobs is not None]
    if not asking:
        return {}
    rows = torch.tensor(asking, device=logits_sv.device)
    logprobs_sv = logits_sv[rows].log_softmax(dim=-1)
    ids_s = chosen_s[rows]
    ids, values = ids_s.tolist(), logprobs_sv.gather(-1, ids_s[:, None])[:, 0].tolist()
    most = min(max(params[row].logprobs or 0 for row in asking), logprobs_sv.shape[-1])
    top_values, top_ids = (part.tolist() for part in logprobs_sv.topk(most, dim=-1))
    found = {}
    for index, row in enumerate(asking):
        wanted = params[row].logprobs or 0
        top = tuple(zip(top_ids[index][:wanted], top_values[index][:wanted], strict=True))
        found[row] = TokenLogprob(ids[index], values[index], top)
    return found
