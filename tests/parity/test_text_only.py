"""Checkpoints without an encoder: adapters in one batch equal to merged models, pictures refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from polylens import LLM, ChatRequest, Completion, TextRequest
from polylens.core import Component
from polylens.engine.compare import compare
from polylens.errors import RequestError
from tests.families.adapters import randomise_lora
from tests.families.media import picture, user, video
from tests.families.text_only import LANGUAGE_MODELS, build_language_model
from tests.parity.harness import greedy, reference_completion

TARGETS = {"attention": ["q_proj", "k_proj", "v_proj", "o_proj"], "all": "all-linear"}
QUESTIONS = ("what is seven plus five?", "describe the difference between the first and the second. " * 8)
NUM_TOKENS = 6


def _model(folder: Path) -> PreTrainedModel:
    (name,) = AutoConfig.from_pretrained(folder).architectures
    return getattr(transformers, name).from_pretrained(folder, dtype=torch.float32)


@dataclass(frozen=True)
class TextBench:
    folder: Path
    adapters: dict[str, Path]

    def expected(self, question: str, adapter: str | None) -> Completion:
        model = _model(self.folder)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, str(self.adapters[adapter])).merge_and_unload()
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        model.generation_config.eos_token_id = None
        out = model.generate(
            **inputs, max_new_tokens=NUM_TOKENS, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        logits = torch.stack([step[0].float() for step in out.logits])
        return reference_completion(out.sequences[0, -NUM_TOKENS:].tolist(), logits)

    def check(self, llm: LLM, adapters: Sequence[str | None]) -> None:
        asked = [(question, adapter) for question in QUESTIONS for adapter in adapters]
        answers = llm.generate([ChatRequest(user(q), adapter, greedy(NUM_TOKENS)) for q, adapter in asked])
        comparison = compare(answers, [self.expected(*one) for one in asked])
        assert comparison.ok, comparison.differences
        llm.check_integrity()


@pytest.fixture(scope="module", params=sorted(LANGUAGE_MODELS))
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextBench:
    folder = build_language_model(request.param, tmp_path_factory.mktemp(request.param))
    adapters = {}
    for seed, (name, targets) in enumerate(TARGETS.items()):
        adapted = get_peft_model(
            _model(folder),
            LoraConfig(r=4, lora_alpha=8, target_modules=targets),
        )
        randomise_lora(adapted, seed)
        adapters[name] = tmp_path_factory.mktemp(name)
        adapted.save_pretrained(str(adapters[name]))
    return TextBench(folder, adapters)


@pytest.mark.parametrize("mode", ["auto", "fused"])
def test_mixed_batch_equals_merged_models(bench: TextBench, mode: str) -> None:
    with LLM(bench.folder, bench.adapters, apply_mode=mode, max_step_tokens=64) as llm:
        assert llm.loaded.is_proven
        assert not llm.loaded.is_hosted
        bench.check(llm, [None, *bench.adapters])


def test_all_layers_are_the_language_models(bench: TextBench) -> None:
    with LLM(bench.folder) as llm:
        assert {spec.component for spec in llm.loaded.layers.specs.values()} == {Component.LANGUAGE_MODEL}


@pytest.mark.parametrize("part", [picture(16, 16), video(4, 16, 16)], ids=["picture", "video"])
def test_media_are_refused(bench: TextBench, part: object) -> None:
    with LLM(bench.folder) as llm:
        with pytest.raises(RequestError, match="it takes no pictures"):
            llm.chat(user("what is it?", part))
        (answer,) = llm.generate([TextRequest("seven plus", None, greedy(2))])
        assert isinstance(answer, Completion)


def test_pixel_settings_are_refused(bench: TextBench) -> None:
    with LLM(bench.folder) as llm, pytest.raises(RequestError, match="mm_processor_kwargs"):
        llm.generate([ChatRequest(user("hello"), mm_processor_kwargs={"max_pixels": 1000})])
