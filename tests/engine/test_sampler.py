from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from polylens.core import SamplingParams
from polylens.engine import sampler
from polylens.engine.sampler import Filters, Sampled, Sampler, filter_sorted, make_generator
from polylens.errors import InternalError, RequestError

VOCAB = 12
WARM = SamplingParams(temperature=0.8, seed=1)


def sample(logits, params):
    return Sampler().sample(logits, params, [make_generator(one) for one in params])


def plain_distribution(logits: list[float], params: SamplingParams) -> list[float]:
    """The definition, one token at a time: temperature, top_k, top_p, min_p."""
    weights = {token: math.exp(logit / params.temperature) for token, logit in enumerate(logits)}
    ranked = sorted(weights, key=lambda token: (-weights[token], token))
    kept = ranked[: params.top_k] if params.top_k else ranked
    total, reached, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if reached >= params.top_p and params.top_p < 1:
            break
        nucleus.append(token)
        reached += weights[token] / total
    nucleus = [token for token in nucleus if weights[token] >= params.min_p * weights[ranked[0]]]
    total = sum(weights[token] for token in nucleus)
    return [weights[token] / total if token in nucleus else 0.0 for token in range(len(logits))]


def drawn_distribution(logits: torch.Tensor, params: SamplingParams, count: int = 4000) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    results = Sampler().sample(logits.expand(count, -1), [params] * count, [generator] * count)
    counts = Counter(one.token_id for one in results if isinstance(one, Sampled))
    return [counts[token] / count for token in range(len(logits))]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 2.5},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 8, "top_p": 0.9, "min_p": 0.05, "temperature": 1.7},
    ],
    ids=str,
)
def test_draws_follow_the_plain_definition(options):
    params = replace(SamplingParams(temperature=1.0), **options)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5
    expected, drawn = plain_distribution(logits.tolist(), params), drawn_distribution(logits, params)
    for one, other in zip(expected, drawn, strict=True):
        assert abs(one - other) < 0.035
        assert (one == 0) <= (other == 0)


@pytest.mark.parametrize("seed", range(20))
def test_filters_keep_exactly_what_the_definition_keeps(seed):
    rng = random.Random(seed)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)).mul(2).sort(descending=True).values
    top_k, top_p, min_p = rng.choice((0, 1, 4, 50)), rng.choice((1e-9, 0.3, 0.8, 1.0)), rng.choice((0.0, 0.1, 0.9))
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    filters = Filters.of([params], logits)
    (kept,), _ = filter_sorted(logits.softmax(-1)[None], torch.zeros(1), filters)
    expected = plain_distribution(logits.tolist(), params)
    torch.testing.assert_close(kept / kept.sum(), torch.tensor(expected), atol=1e-6, rtol=0)
    assert [weight > 0 for weight in kept.tolist()] == [weight > 0 for weight in expected]


@pytest.mark.parametrize(
    "options",
    [{"top_p": 0.5}, {"top_p": 0.97}, {"min_p": 0.3}, {"min_p": 1e-6}, {"top_k": 3}, {"top_k": 9, "top_p": 0.9}],
    ids=str,
)
@pytest.mark.parametrize("num_candidates", [1, 4, 8])
def test_few_candidates_draw_what_all_would(monkeypatch, options, num_candidates):
    params = replace(WARM, **options)
    logits = torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(4)) * 2
    expected = sample(logits, [params] * 200)
    monkeypatch.setattr(sampler, "NUM_CANDIDATES", num_candidates)
    assert sample(logits, [params] * 200) == expected


def test_order_is_top_k_before_top_p_before_min_p():
    # Probabilities .4 .3 .2 .1: of the first two, rescaled, the first alone reaches 0.55; of all four it does not.
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    both = SamplingParams(temperature=1.0, top_k=2, top_p=0.55)
    assert drawn_distribution(logits, both, 200) == [1, 0, 0, 0]
    assert drawn_distribution(logits, replace(both, top_k=0), 200)[1] > 0
    # min_p first would leave .4 .3, of which 0.6 needs both, as it does of all four; 0.55 differs again.
    last = SamplingParams(temperature=1.0, top_p=0.55, min_p=0.7)
    assert drawn_distribution(logits, last, 200)[1] > 0


def test_greedy_takes_the_largest_logit_for_all_rows_at_once():
    logits = torch.randn(5, VOCAB)
    results = sample(logits, [SamplingParams()] * 5)
    assert results == [Sampled(token, None) for token in logits.argmax(-1).tolist()]


def test_a_seed_draws_the_same_whatever_the_batch():
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(0))
    mates = [
        SamplingParams(),
        SamplingParams(temperature=1.5),
        SamplingParams(temperature=1.0, top_p=0.5, seed=9),
        SamplingParams(temperature=0.3, top_k=2),
    ]
    for params in (WARM, replace(WARM, top_p=0.95), replace(WARM, top_k=5, min_p=0.01)):
        alone, mixed = make_generator(params), make_generator(params)
        expected, found = [], []
        for step, row in enumerate(logits):
            expected += Sampler().sample(row[None], [params], [alone])
            place = step % 5
            batch = [*mates[:place], params, *mates[place:]]
            generators = [make_generator(one) for one in batch]
            generators[place] = mixed
            rows = torch.randn(5, VOCAB)
            rows[place] = row
            found.append(Sampler().sample(rows, batch, generators)[place])
        assert found == expected


def test_seeds_differ_and_no_seed_is_random():
    logits, count = torch.zeros(1, 1000), 6
    draws = [sample(logits, [replace(WARM, seed=seed)])[0].token_id for seed in range(count)]
    assert len(set(draws)) > 1
    assert len({sample(logits, [replace(WARM, seed=None)])[0].token_id for _ in range(count)}) > 1
    assert make_generator(SamplingParams(seed=3)) is None


def test_logprobs_are_of_the_raw_logits():
    logits = torch.randn(3, VOCAB)
    plain = logits.log_softmax(-1)
    params = [SamplingParams(logprobs=2), SamplingParams(), replace(WARM, temperature=5.0, top_k=4, logprobs=0)]
    greedy, without, warm = sample(logits, params)
    assert without.logprob is None
    assert (greedy.logprob.token_id, warm.logprob.token_id) == (greedy.token_id, warm.token_id)
    assert greedy.logprob.logprob == pytest.approx(plain[0].max().item())
    assert [token for token, _ in greedy.logprob.top] == plain[0].topk(2).indices.tolist()
    assert [value for _, value in greedy.logprob.top] == pytest.approx(plain[0].topk(2).values.tolist())
    assert warm.logprob.logprob == pytest.approx(plain[2, warm.token_id].item())
    assert warm.logprob.top == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [SamplingParams(), WARM, replace(WARM, top_p=0.5), SamplingParams(logprobs=3)])
def test_a_row_that_is_not_finite_fails_alone(bad, params):
    logits = torch.randn(3, VOCAB)
    healthy = sample(logits, [params] * 3)
    if bad == -math.inf:
        logits[1] = bad
    else:
        logits[1, 4] = bad
    first, second, third = sample(logits, [params] * 3)
    assert isinstance(second, InternalError)
    assert [first, third] == [healthy[0], healthy[2]]


def test_masked_tokens_are_never_drawn():
    logits = torch.full((VOCAB,), -math.inf)
    logits[[2, 7]] = 0.0
    for params in (
        SamplingParams(temperature=1e30),
        SamplingParams(temperature=1e300),
        SamplingParams(temperature=1.0),
    ):
        drawn = drawn_distribution(logits, params, 200)
        assert {token for token, share in enumerate(drawn) if share} == {2, 7}


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-320])
def test_very_low_temperatures_are_greedy(temperature):
    logits = torch.randn(4, VOCAB) * 100
    results = sample(logits, [SamplingParams(temperature=temperature, seed=0)] * 4)
    assert [one.token_id for one in results] == logits.argmax(-1).tolist()


def test_logits_are_left_as_they_are():
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    sample(logits, [SamplingParams(logprobs=1), replace(WARM, top_k=2)])
    assert torch.equal(logits, before)


def test_an_empty_step_gives_nothing():
    assert Sampler().sample(torch.empty(0, VOCAB), [], []) == []


def test_half_precision_logits():
    logits = torch.randn(3, VOCAB).bfloat16()
    assert all(isinstance(one, Sampled) for one in sample(logits, [SamplingParams(), WARM, replace(WARM, top_k=3)]))


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("max_tokens", "7"),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "1"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1.0),
        ("seed", -1),
        ("seed", 2**63),
        ("logprobs", -1),
        ("stop", ("",)),
        ("stop", "end"),
        ("stop_token_ids", (-1,)),
    ],
)
def test_values_out_of_range_are_named(param, value):
    with pytest.raises(RequestError, match=f"^{param} must be ") as caught:
        replace(SamplingParams(), **{param: value})
    assert caught.value.param == param


def test_values_at_the_edges_are_taken():
    SamplingParams(1, 0, 1, 0, 0, 2**63 - 1, ("a",), (0,), 20)
    make_generator(SamplingParams(temperature=1.0, seed=2**63 - 1))
