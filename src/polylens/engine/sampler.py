"""From logits to tokens, for all sequences of a step at once.

The order of the filters, as Transformers' `generate` has it: temperature, then top_k, then top_p over what
top_k left, then min_p over what top_p left. Each token takes one uniform draw from the request's own
generator, so what a request draws does not depend on its batch mates. Log-probabilities are those of the raw
logits: before temperature and filters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from polylens.core import TokenLogprob
from polylens.errors import InternalError, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from polylens.core import SamplingParams

MAX_LOGPROBS = 20
"""Most alternatives returned per token: what OpenAI's API allows."""

MAX_SEED = 2**64 - 1
"""Largest seed torch takes."""


SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny
"""Positive temperatures that float32 rounds to 0 count as this: only exact ties with the largest logit remain."""

LARGEST_TEMPERATURE = torch.finfo(torch.float32).max
"""Temperatures beyond float32 count as this: all tokens are as likely, but those at -inf stay out."""


@dataclass(frozen=True)
class Sampled:
    """A chosen token; `logprob` if the request asked for logprobs."""

    token_id: int
    logprob: TokenLogprob | None


def check_sampling(params: SamplingParams) -> None:
    """Raise RequestError for the first value of `params` that has a wrong type or is out of range."""
    _check_integer("max_tokens", params.max_tokens, 1)
    _check("temperature", params.temperature, _is_number(params.temperature) and params.temperature >= 0, "0 or more")
    _check("top_p", params.top_p, _is_number(params.top_p) and 0 < params.top_p <= 1, "above 0 and at most 1")
    _check_integer("top_k", params.top_k, 0)
    _check("min_p", params.min_p, _is_number(params.min_p) and 0 <= params.min_p < 1, "at least 0 and below 1")
    if params.seed is not None:
        _check_integer("seed", params.seed, 0, MAX_SEED)
    if params.logprobs is not None:
        _check_integer("logprobs", params.logprobs, 0, MAX_LOGPROBS)
    stops = isinstance(params.stop, tuple | list) and all(isinstance(stop, str) and stop for stop in params.stop)
    _check("stop", params.stop, stops, "a tuple of strings, none of them empty")
    for token_id in params.stop_token_ids:
        _check_integer("stop_token_ids", token_id, 0)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_integer(param: str, value: object, low: int, high: int | None = None) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and low <= value and (high is None or value <= high)
    _check(param, value, ok, f"an integer from {low}" + (f" to {high}" if high is not None else " up"))


def _check(param: str, value: object, ok: bool, rule: str) -> None:
    if not ok:
        raise RequestError(f"{param} must be {rule}, not {value!r}", param=param)


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
    ) -> list[Sampled | InternalError]:
        """One result per row of `logits_sv` (sequences, vocab), float, unchanged by this.

        `params` and `generators` (`make_generator`) belong to the rows in order. A row that is not a
        distribution (NaN, +inf, or nothing above -inf) gives an InternalError in its place; the others are
        not affected.
        """
        if not params:
            return []
        logits_sv = logits_sv.float()
        valid = torch.isfinite(logits_sv.amax(dim=-1))
        chosen = logits_sv.argmax(dim=-1)
        drawing = [row for row, one in enumerate(params) if one.temperature > 0]
        if drawing:
            rows = torch.tensor(drawing, device=logits_sv.device)
            chosen[rows] = _draw(
                logits_sv[rows], [params[row] for row in drawing], [generators[row] for row in drawing]
            )
        logprobs = _logprobs(logits_sv, chosen, params)
        return [
            Sampled(token, logprobs.get(row)) if ok else InternalError("the model gave logits that are not finite")
            for row, (token, ok) in enumerate(zip(chosen.tolist(), valid.tolist(), strict=True))
        ]


def _draw(
    logits_sv: torch.Tensor, params: Seq[SamplingParams], generators: Seq[torch.Generator | None]
) -> torch.Tensor:
    """Token ids (s,), one draw a row, from the filtered distributions."""
    draws_s = torch.tensor([_uniform(generator) for generator in generators], dtype=torch.float64).to(logits_sv.device)
    temperature_s = logits_sv.new_tensor([one.temperature for one in params]).clamp(SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE)
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
            pick = _pick_filtered if sort else _pick
            chosen[rows] = pick(logits_sv[rows], draws_s[rows], [params[row] for row in group])
    return chosen


def _uniform(generator: torch.Generator | None) -> float:
    if generator is None:
        raise InternalError("a request that samples has no generator")
    return float(torch.rand((), dtype=torch.float64, generator=generator))


def _pick(logits_sv: torch.Tensor, draws_s: torch.Tensor, params: Seq[SamplingParams]) -> torch.Tensor:
    return _invert(logits_sv.softmax(dim=-1), draws_s)


def _pick_filtered(logits_sv: torch.Tensor, draws_s: torch.Tensor, params: Seq[SamplingParams]) -> torch.Tensor:
    sorted_sv, ids_sv = logits_sv.sort(dim=-1, descending=True, stable=True)
    probs_sv = filter_sorted(
        sorted_sv.softmax(dim=-1),
        top_k=torch.tensor([one.top_k for one in params], device=logits_sv.device),
        top_p=logits_sv.new_tensor([one.top_p for one in params]),
        min_p=logits_sv.new_tensor([one.min_p for one in params]),
    )
    return ids_sv.gather(-1, _invert(probs_sv, draws_s)[:, None])[:, 0]


def filter_sorted(
    probs_sv: torch.Tensor, *, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """`probs_sv` (rows, vocab; each row descending, sum 1) with zeros for what the filters remove; not rescaled.

    top_k (rows,): keep the first k; 0 keeps all. top_p (rows,): of these, rescaled to sum 1, keep the fewest
    that reach p together. min_p (rows,): keep those of at least min_p times the largest. The most probable
    token always stays.
    """
    ranks_v = torch.arange(probs_sv.shape[-1], device=probs_sv.device)
    in_top_k = (ranks_v < top_k[:, None]) | (top_k[:, None] == 0)
    probs_sv = probs_sv * in_top_k
    sums_sv = probs_sv.cumsum(dim=-1)
    before_sv = torch.nn.functional.pad(sums_sv[:, :-1], (1, 0))
    # top_p 1 keeps all, whatever the rounding of the sums.
    in_top_p = (before_sv < top_p[:, None] * sums_sv[:, -1:]) | (top_p[:, None] == 1)
    in_min_p = probs_sv >= min_p[:, None] * probs_sv[:, :1]
    return probs_sv * ((in_top_p & in_min_p) | (ranks_v == 0))


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
