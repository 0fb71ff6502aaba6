"""Adapters that bring processor files: equal to transformers' processor of their folder and the merged model.

One adapter each of the ways trainers save them: all of it (a chat template and an added token), picture limits in the
older file, a template in the tokenizer's config, copies of the base model's files, and nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor, ProcessorMixin

from polylens import LLM, ChatRequest
from polylens.engine.compare import compare
from polylens.engine.verify import verify
from polylens.models.prepared import PreparedPrompt
from tests.families.adapters import make_adapter
from tests.families.media import picture, user
from tests.families.reference import Messages, generated, merged_model, reference_inputs
from tests.parity.harness import NUM_TOKENS, greedy, reference_completion

FAMILIES = ("qwen2_5_vl", "gemma3", "llava")
OTHER_TEMPLATE = "{{ bos_token or '' }}{% for message in messages %}<q>{% for part in message['content'] %}"
OTHER_TEMPLATE += "{% if part['type'] == 'image' %}PICTURE{% else %}{{ part['text'] }}{% endif %}{% endfor %}</q>\n"
OTHER_TEMPLATE += "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
PLACEHOLDERS = {
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "llava": "<image>",
}
QUESTION = user(picture(56, 40, 1), "what is in the picture?")
TEXT = user("answer with one number only: what is seven plus five?")


def template(family: str) -> str:
    return OTHER_TEMPLATE.replace("PICTURE", PLACEHOLDERS[family])


def save_whole(processor: ProcessorMixin, folder: Path, family: str) -> None:
    """As transformers 5 saves: another template, and a token that the tokenizer did not have."""
    processor.tokenizer.add_tokens(["<q>"], special_tokens=True)
    processor.chat_template = template(family)
    processor.save_pretrained(folder)


def save_limits(processor: ProcessorMixin, folder: Path, family: str) -> None:
    """As transformers 4 saves: one file for the pictures' settings."""
    settings = processor.image_processor.to_dict()
    if family == "qwen2_5_vl":
        settings |= {"min_pixels": 64, "max_pixels": 512}
        del settings["size"]
    settings["image_mean"] = [0.1, 0.2, 0.3]
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def save_config_template(processor: ProcessorMixin, folder: Path, family: str) -> None:
    """As LLaMA-Factory with transformers 4 saves: the template in the tokenizer's config."""
    processor.tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template(family)}))


def save_copies(processor: ProcessorMixin, folder: Path, family: str) -> None:
    processor.save_pretrained(folder)


SAVERS: dict[str, Callable[[ProcessorMixin, Path, str], None]] = {
    "whole": save_whole,
    "limits": save_limits,
    "template": save_config_template,
    "copies": save_copies,
}


class Bench:
    def __init__(self, family: str, checkpoint: Path, folder: Path) -> None:
        self.family, self.checkpoint = family, checkpoint
        self.adapters = {
            name: make_adapter(checkpoint, folder / name, targets="all", rank=4, seed=seed)
            for seed, name in enumerate((*SAVERS, "nothing"))
        }
        for name, save in SAVERS.items():
            save(AutoProcessor.from_pretrained(checkpoint), self.adapters[name], family)

    def processor(self, name: str | None) -> ProcessorMixin:
        """transformers' own for the adapter's folder, its missing parts the base model's."""
        base = AutoProcessor.from_pretrained(self.checkpoint)
        if name == "whole":
            return type(base).from_pretrained(self.adapters[name])
        if name == "limits":
            base.image_processor = type(base.image_processor).from_pretrained(self.adapters[name])
        if name == "template":
            base.chat_template = template(self.family)
        return base

    def expected(self, name: str | None, messages: Messages) -> tuple[dict[str, torch.Tensor], Any]:
        inputs = reference_inputs(self.processor(name), messages)
        model = merged_model(self.checkpoint, None if name is None else self.adapters[name], torch.float32)
        return inputs, reference_completion(*generated(model, inputs, NUM_TOKENS, ignore_eos=True))


@pytest.fixture(scope="module", params=FAMILIES)
def bench(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Bench:
    return Bench(request.param, checkpoint(request.param), tmp_path_factory.mktemp(f"own-{request.param}"))


@pytest.fixture(scope="module")
def llm(bench: Bench) -> Iterator[LLM]:
    with LLM(bench.checkpoint, bench.adapters) as llm:
        yield llm


def assert_prepared(prompt: PreparedPrompt, inputs: Mapping[str, torch.Tensor]) -> None:
    assert prompt.token_ids == inputs["input_ids"][0].tolist()
    for item in prompt.items:
        for name, tensor in item.tensors.items():
            assert torch.equal(tensor, inputs[name].to(tensor.dtype)), name


def test_tokens_and_pixels_are_those_of_the_folders_processor(bench: Bench, llm: LLM):
    seen = {}
    for name in (None, *bench.adapters):
        prompt = llm.processing(name).prepare(QUESTION)
        assert_prepared(prompt, reference_inputs(bench.processor(name), QUESTION))
        seen[name] = prompt
    assert seen["whole"].token_ids != seen["template"].token_ids != seen[None].token_ids
    assert seen["limits"].items[0].settings_key != seen[None].items[0].settings_key
    assert seen["whole"].items[0].settings_key == seen[None].items[0].settings_key


def test_a_mixed_batch_equals_merged_models_with_these_processors(bench: Bench, llm: LLM):
    asked = [(name, messages) for messages in (QUESTION, TEXT) for name in (None, *bench.adapters)]
    answers = llm.generate([ChatRequest(messages, name, greedy()) for name, messages in asked])
    expected = [bench.expected(name, messages) for name, messages in asked]
    comparison = compare(answers, [completion for _, completion in expected])
    assert comparison.ok, comparison.differences
    assert [answer.usage.prompt_tokens for answer in answers] == [len(ids["input_ids"][0]) for ids, _ in expected]
    llm.check_integrity()


def test_copies_of_the_base_models_files_cost_nothing(bench: Bench, llm: LLM):
    base = llm.processing()
    assert llm.processing("copies") is base
    assert llm.processing("nothing") is base
    assert llm.processing("template").tokenizer is base.tokenizer
    assert llm.processing("limits").tokenizer is base.tokenizer
    reports = {name: llm.registry.report(name).processing for name in bench.adapters}
    assert reports["copies"] == reports["nothing"] == ()
    assert reports["whole"] == ("tokenizer", "chat template")
    assert reports["template"] == ("chat template",)
    assert "image settings" in reports["limits"]


def test_the_switches_turn_it_off(bench: Bench):
    with LLM(bench.checkpoint, bench.adapters, adapter_processors=False) as llm:
        assert llm.processing("limits") is llm.processing()
        assert llm.processing("template") is not llm.processing()
    with LLM(bench.checkpoint, bench.adapters, adapter_templates=False) as llm:
        assert llm.processing("limits") is not llm.processing()
        assert llm.processing("template") is llm.processing("whole") is llm.processing()


@pytest.mark.parametrize(
    "bench", ["qwen2_5_vl", *(pytest.param(name, marks=pytest.mark.full) for name in FAMILIES[1:])], indirect=True
)
def test_verify_knows_them(bench: Bench):
    adapters = {name: bench.adapters[name] for name in ("whole", "limits")}
    result = verify(bench.checkpoint, adapters, max_tokens=4)
    assert result.ok, [check.problems for check in result.adapters.values()]
