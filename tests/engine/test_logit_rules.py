from __future__ import annotations

import pytest
import torch

from polylens.core import SamplingParams
from polylens.engine.logit_rules import LogitRules, check_logit_bias
from polylens.engine.sampler import Sampled, Sampler
from polylens.errors import RequestError


def applied(logits: list[float], sampling: SamplingParams, prompt: list[int] = [], answer: list[int] = []):  # noqa: B006
    rules = LogitRules.start(sampling, prompt)
    assert rules is not None
    for token_id in answer:
        rules.accept(token_id)
    logits_v = torch.tensor(logits)
    rules.apply_(logits_v)
    return [round(value, 4) for value in logits_v.tolist()]


def test_most_requests_have_no_rules():
    assert LogitRules.start(SamplingParams(), [1, 2]) is None


def test_presence_counts_a_token_once_and_frequency_every_time_and_neither_the_prompt():
    logits = [1.0, 2.0, 3.0, 4.0]
    assert applied(logits, SamplingParams(presence_penalty=0.5), [0], [1, 1, 3]) == [1.0, 1.5, 3.0, 3.5]
    assert applied(logits, SamplingParams(frequency_penalty=0.5), [0], [1, 1, 3]) == [1.0, 1.0, 3.0, 3.5]
    assert applied(logits, SamplingParams(frequency_penalty=-0.5), [0], []) == logits


def test_repetition_takes_prompt_and_answer_and_moves_both_signs_down():
    sampling = SamplingParams(repetition_penalty=2.0)
    assert applied([2.0, -2.0, 3.0, -4.0], sampling, [0, 0], [3]) == [1.0, -2.0, 3.0, -8.0]


def test_repetition_is_as_transformers_has_it():
    from transformers import RepetitionPenaltyLogitsProcessor

    logits_v = torch.randn(20, generator=torch.Generator().manual_seed(0))
    prompt, answer = [3, 4, 4, 9], [9, 1, 17]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + answer]), logits_v[None].clone())[0]
    rules = LogitRules(SamplingParams(repetition_penalty=1.3), prompt, None)
    for token_id in answer:
        rules.accept(token_id)
    rules.apply_(logits_v)
    torch.testing.assert_close(logits_v, expected)


def test_bias_comes_before_the_penalties():
    sampling = SamplingParams(logit_bias={0: -5.0, 2: 1.5}, repetition_penalty=2.0, presence_penalty=1.0)
    assert applied([1.0, 2.0, 3.0], sampling, [0], [2]) == [-8.0, 2.0, 1.25]


def test_rules_are_each_rows_own_and_logprobs_those_of_the_raw_logits():
    logits_sv = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    before = logits_sv.clone()
    params = [SamplingParams(logprobs=1), SamplingParams(logit_bias={2: -100.0}, logprobs=1), SamplingParams()]
    rules = [LogitRules.start(one, []) for one in params]
    sampled = Sampler().sample(logits_sv, params, [None] * 3, rules)
    assert [one.token_id for one in sampled if isinstance(one, Sampled)] == [2, 1, 2]
    expected = before[0].log_softmax(-1)
    assert isinstance(sampled[1], Sampled)
    assert sampled[1].logprob is not None
    assert sampled[1].logprob.logprob == pytest.approx(float(expected[1]))
    assert sampled[1].logprob.top[0][0] == 2
    assert torch.equal(logits_sv, before)


def test_a_bias_for_an_unknown_token_is_refused():
    with pytest.raises(RequestError, match="token id 9; the model has 9") as caught:
        check_logit_bias(SamplingParams(logit_bias={9: 1.0}), 9)
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", [(1, 2.0)]),
        ("constraint", {"kind": "regex"}),
    ],
)
def test_values_out_of_range_are_named(param: str, value: object):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{param: value})
    assert caught.value.param == param
