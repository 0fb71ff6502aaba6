"""Adapters that bring tokens of their own: embedding and head with more rows than the base model's, and a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel

from polylens import LLM, ChatRequest
from polylens.core import Constraint, SamplingParams
from polylens.engine.compare import compare
from polylens.errors import RequestError
from tests.families.media import picture, user
from tests.families.reference import generated, reference_inputs
from tests.families.special import randomise_special
from tests.parity.harness import BASE, Bench, Case, assert_equal, greedy, reference_completion

NUM_TOKENS = 6
PLAIN = "all"
FAMILIES = ("qwen2_vl", "gemma3")
"""A head of its own, and one tied to scaled embeddings."""


def questions(name: str) -> dict[str, list[dict[str, Any]]]:
    return {
        "picture": user(picture(32, 24, 1), f"{name} what is in the picture? {name}"),
        "text": user(f"what is seven plus {name}?"),
    }


class Grown:
    """A family's checkpoint, an adapter of it with more tokens, and PEFT's own answers with that."""

    def __init__(self, checkpoint: Path, folder: Path, num_more: int, seed: int) -> None:
        self.folder = folder
        self.processor = AutoProcessor.from_pretrained(checkpoint)
        tokenizer = self.processor.tokenizer
        base = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
        num_own = base.get_input_embeddings().weight.shape[0]
        self.num_tokens = num_own + num_more
        names = [f"own{index}x" for index in range(self.num_tokens - len(tokenizer))]
        tokenizer.add_tokens(names)
        self.token = names[-1]
        assert tokenizer.convert_tokens_to_ids(self.token) == self.num_tokens - 1
        options = {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
        adapted = get_peft_model(self._grown(base), LoraConfig(r=3, lora_alpha=6, **options))
        randomise_special(adapted, seed)
        with torch.no_grad():  # so large that new tokens are answered too, one where another is not
            head = adapted.get_output_embeddings().weight
            signs = torch.tensor([1.0, -1.0]).repeat(num_more)[:num_more, None]
            head[num_own:] = 4 * signs * head[9:10]
        adapted.save_pretrained(str(folder))
        tokenizer.save_pretrained(folder)
        base = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
        self._model = PeftModel.from_pretrained(self._grown(base), str(folder))
        self.num_own = num_own

    def _grown(self, base: PreTrainedModel) -> PreTrainedModel:
        base.resize_token_embeddings(self.num_tokens, mean_resizing=False)
        return base

    def expected(self, messages: list[dict[str, Any]]) -> Any:
        inputs = reference_inputs(self.processor, messages)
        return reference_completion(*generated(self._model, inputs, NUM_TOKENS, ignore_eos=True))


@pytest.mark.parametrize("family", [FAMILIES[0], pytest.param(FAMILIES[1], marks=pytest.mark.full)])
def test_each_has_its_own_tokens(family: str, bench_of: Callable[[str], Bench], tmp_path: Path) -> None:
    """Two vocabularies beside a plain adapter and the base in one batch, each as PEFT's own model alone."""
    bench = bench_of(family)
    grown = {
        "more": Grown(bench.checkpoint, tmp_path / "more", 3, 1),
        "few": Grown(bench.checkpoint, tmp_path / "few", 1, 2),
    }
    adapters = {**{name: one.folder for name, one in grown.items()}, PLAIN: bench.adapters[PLAIN]}
    asked = [
        (Case(question, name), messages)
        for name, one in grown.items()
        for question, messages in questions(one.token).items()
    ]
    plain = [Case(question, name) for name in (BASE, PLAIN) for question in ("picture", "text")]
    expected = [grown[case.adapter].expected(messages) for case, messages in asked]
    expected += [bench.expected(case, NUM_TOKENS) for case in plain]
    requests = [ChatRequest(messages, case.adapter, greedy(NUM_TOKENS)) for case, messages in asked]
    requests += [
        ChatRequest(bench.questions[case.question], None if case.adapter == BASE else case.adapter, greedy(NUM_TOKENS))
        for case in plain
    ]
    with LLM(bench.checkpoint, adapters) as llm:
        answers = llm.generate(requests)
        cases = [case for case, _ in asked] + plain
        assert_equal(compare(answers, expected), cases)
        sizes = {case.adapter: answer.logits[0].shape[0] for case, answer in zip(cases, answers, strict=True)}
        base = grown["more"].num_own
        assert sizes == {"more": base + 3, "few": base + 1, BASE: base, PLAIN: base}
        for answer, one in zip(answers, expected, strict=True):
            assert answer.logits[0].shape == one.logits[0].shape
        assert any(token >= base for answer in answers for token in answer.token_ids)
        assert llm.generate(requests[:1])[0].token_ids == answers[0].token_ids
        own = SamplingParams(max_tokens=1, constraint=Constraint("choice", (grown["more"].token,)))
        assert llm.chat(questions("five")["text"], adapter="more", sampling=own).token_ids == (base + 2,)
        biased = SamplingParams(max_tokens=1, logit_bias={base: 100.0})
        assert llm.chat(questions("five")["text"], adapter="few", sampling=biased).token_ids == (base,)
        with pytest.raises(RequestError, match=f"the model has {base} tokens"):
            llm.chat(questions("five")["text"], adapter=PLAIN, sampling=biased)
        llm.check_integrity()
