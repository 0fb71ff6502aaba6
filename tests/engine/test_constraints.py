from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import polylens.demo
from polylens import LLM, ChatRequest, SamplingParams
from polylens.core import Constraint, FinishReason
from polylens.engine.constraints import Constraints, ConstraintState
from polylens.errors import RequestError
from tests.families.media import picture, user
from tests.families.tokenizers_and_templates import gemma_tokenizer, llava_tokenizer, qwen_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "unit": {"enum": ["bar", "psi", "m³"]}},
    "required": ["value", "unit"],
    "additionalProperties": False,
}
CHOICES = ("yes", "nö", "a.b*c", 'quo"te\\', "two\nlines", " lead", "\x7f", "😀")
TOKENIZERS = {"qwen": qwen_tokenizer, "gemma": gemma_tokenizer, "llava": llava_tokenizer}
DEMO = Path(polylens.demo.__file__).parent / "data" / "model"


def tokenizer_of(name: str) -> Any:
    if name != "demo":
        return TOKENIZERS[name]()
    if not (DEMO / "tokenizer.json").exists():
        pytest.skip("the demo model is not built")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO)


def random_answer(constraints: Constraints, tokenizer: Any, constraint: Constraint, rng: random.Random) -> str | None:
    """What a model with random logits answers under the constraint; None if it comes to no end."""
    state, ids = constraints.start(constraint), []
    for _ in range(200):
        logits_v = torch.tensor([rng.random() for _ in range(len(tokenizer) + 7)])
        # Ends are unlikely among hundreds of tokens of strings.
        logits_v[tokenizer.convert_tokens_to_ids(['"', "}"])] += 0.3
        state.mask_(logits_v)
        token_id = int(logits_v.argmax())
        state.accept(token_id)
        if token_id == tokenizer.eos_token_id:
            return tokenizer.decode(ids)
        ids.append(token_id)
        if state.ended:
            return tokenizer.decode(ids)
    return None


@pytest.mark.parametrize("name", [*TOKENIZERS, "demo"])
def test_whatever_a_model_prefers_the_answer_has_the_form(name: str):
    tokenizer = tokenizer_of(name)
    constraints = Constraints(tokenizer, len(tokenizer) + 7, [tokenizer.eos_token_id])
    rng, found = random.Random(name), 0
    for _ in range(5):
        answer = random_answer(constraints, tokenizer, Constraint("json_schema", SCHEMA), rng)
        if answer is not None:
            found += 1
            value = json.loads(answer)
            assert isinstance(value.pop("value"), int)
            assert value.pop("unit") in SCHEMA["properties"]["unit"]["enum"]  # type: ignore[index]
            assert not value
        answer = random_answer(constraints, tokenizer, Constraint("json_object"), rng)
        assert answer is None or isinstance(json.loads(answer), dict)
        answer = random_answer(constraints, tokenizer, Constraint("regex", r"[0-9]{2,4} (bar|psi)"), rng)
        assert answer is not None
        assert re.fullmatch(r"[0-9]{2,4} (bar|psi)", answer)
        answer = random_answer(constraints, tokenizer, Constraint("choice", CHOICES), rng)
        # A sentencepiece decoder strips the space an answer begins with.
        assert answer in [*CHOICES, "lead"]
    assert found


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("json_schema", {"type": "nope"}, "Invalid type: nope"),
        ("json_schema", {"not": {}}, "Unimplemented keys"),
        ("json_schema", {"$ref": "http://localhost/x"}, "not present in a registry"),
        ("json_schema", {"x": {1, 2}}, "not a JSON schema"),
        ("regex", "(unclosed", "unclosed group"),
        ("regex", "a(?=b)", "look-around"),
        ("regex", "a" * 40_000, "40000 characters"),
    ],
)
def test_what_cannot_be_held_is_refused_with_a_reason(kind: Any, value: Any, reason: str):
    tokenizer = qwen_tokenizer()
    with pytest.raises(RequestError, match=reason) as caught:
        Constraints(tokenizer, len(tokenizer), []).start(Constraint(kind, value))
    assert caught.value.param == "constraint"


@pytest.mark.parametrize(
    ("kind", "value"),
    [("json", None), ("json_object", {}), ("json_schema", "{}"), ("regex", ""), ("choice", ()), ("choice", ("a", ""))],
)
def test_malformed_constraints_are_refused(kind: Any, value: Any):
    with pytest.raises(RequestError) as caught:
        Constraint(kind, value)
    assert caught.value.param == "constraint"


def test_states_are_independent_and_grammars_are_kept(monkeypatch: pytest.MonkeyPatch):
    tokenizer = qwen_tokenizer()
    constraints = Constraints(tokenizer, len(tokenizer), [])
    first = constraints.start(Constraint("choice", ("a", "b")))
    monkeypatch.delattr(Constraints, "_compile")
    second = constraints.start(Constraint("choice", ("a", "b")))
    first.accept(tokenizer.convert_tokens_to_ids("a"))
    assert (first.ended, second.ended) == (True, False)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "llava"])
def test_constraints_in_a_mixed_batch(checkpoint: Callable[[str], Path], family: str):
    question = user(picture(32, 24, 1), "what does the gauge read?")
    free = SamplingParams(max_tokens=12)
    forms = [
        Constraint("choice", ("twelve bar", "none", "nö")),
        Constraint("regex", "[0-9]{3}"),
        Constraint("json_schema", {**SCHEMA, "properties": {**SCHEMA["properties"], "value": {"enum": [1, 22]}}}),  # type: ignore[dict-item]
    ]
    with LLM(checkpoint(family)) as llm:
        alone = llm.chat(question, sampling=free)
        sampling = [free, *(SamplingParams(max_tokens=80, constraint=form, ignore_eos=True) for form in forms)]
        answers = llm.generate([ChatRequest(question, None, one) for one in sampling])
        llm.check_integrity()
    assert answers[0].token_ids == alone.token_ids
    choice, number, value = answers[1:]
    assert choice.text in ("twelve bar", "none", "nö")
    assert re.fullmatch("[0-9]{3}", number.text)
    assert json.loads(value.text)["value"] in (1, 22)
    assert {answer.finish_reason for answer in answers[1:]} == {FinishReason.STOP}


def test_a_constraint_that_becomes_too_complex_ends_its_request_only(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    accept = ConstraintState.accept
    accepted: list[int] = []

    def until_the_third(state: ConstraintState, token_id: int) -> None:
        accepted.append(token_id)
        if len(accepted) == 3:
            raise RequestError("the constraint cannot be held: planted", param="constraint")
        accept(state, token_id)

    monkeypatch.setattr(ConstraintState, "accept", until_the_third)
    question = user("what does it read?")
    with LLM(checkpoint("qwen2_5_vl")) as llm:
        sampling = SamplingParams(max_tokens=30, constraint=Constraint("json_schema", SCHEMA))
        broken, fine = llm.generate(
            [ChatRequest(question, None, sampling), ChatRequest(question, None, SamplingParams(max_tokens=5))],
            on_error="return",
        )
        llm.check_integrity()
    assert isinstance(broken, RequestError)
    assert len(fine.token_ids) == 5


def test_a_matcher_past_its_limits_says_so():
    tokenizer = qwen_tokenizer()
    schema = {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(1100)}}
    state = Constraints(tokenizer, len(tokenizer), []).start(Constraint("json_schema", schema))
    with pytest.raises(RequestError, match=r"cannot be held: .*max is 2000"):
        accept_all(state, tokenizer('{"k1":')["input_ids"])


def accept_all(state: ConstraintState, token_ids: list[int]) -> None:
    for token_id in token_ids:
        state.accept(token_id)
