"""Parity: polylens in one mixed batch against one merged model per adapter.

A `Bench` holds, for one family, a checkpoint, its adapters and the reference answers (each computed once a test
process). Questions and adapters multiply to `Case`s; `Bench.check` serves cases in one mixed batch and compares
by the project's definition of equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from polylens import LLM, ChatRequest, Completion, SamplingParams
from polylens.config import NUM_SAMPLED_FRAMES
from polylens.core import FinishReason, Usage
from polylens.engine.compare import Comparison, compare
from tests.families.adapters import make_adapter
from tests.families.build import ALL_FAMILIES
from tests.families.media import picture, user, video
from tests.families.reference import evenly_sampled, merged_reference, processor_of, reference_inputs

NUM_TOKENS = 8
"""Generated per request: a prefill and seven decodes."""

BASE = "base"
"""The adapter name of requests without one."""


@dataclass(frozen=True)
class Recipe:
    """How one adapter of the matrix is made (arguments of `make_adapter`)."""

    targets: str
    rank: int
    rank_pattern: dict[str, int] = field(default_factory=dict)
    seed: int = 0


RECIPES: dict[str, Recipe] = {
    "tower": Recipe("tower", rank=4, seed=11),
    "connector": Recipe("connector", rank=8, seed=12),
    "connector+language": Recipe("connector+language", rank=4, rank_pattern={"q_proj": 8, "down_proj": 2}, seed=13),
    "all": Recipe("all", rank=8, rank_pattern={"qkv": 4, "v_proj": 4, "fc1": 3, "o_proj": 16}, seed=14),
}
ADAPTERS = (BASE, *RECIPES)


@dataclass(frozen=True)
class Case:
    """One request: a question (by name) asked of one adapter."""

    question: str
    adapter: str


def questions(family: str) -> dict[str, list[dict[str, Any]]]:
    """Messages by name: the shapes of request that the parity matrix covers."""
    if (frames := ALL_FAMILIES[family].only_videos_of) is not None:
        return {
            "video": user(video(frames, 24, 32, 5), "what is shown in this video?"),
            "wide": user("look: ", video(frames, 64, 40, 2), "what does the gauge read?"),
        }
    asked = {
        "picture": user(picture(32, 24, 1), "what is in the picture?"),
        "wide": user("look: ", picture(64, 40, 2), "what does the gauge read?"),
        "two": user(picture(16, 40, 3), "and", picture(48, 24, 4), "describe the difference"),
        "video": user(video(10, 24, 32, 5), "what is shown in this video?"),
        "text": user("answer with one number only: what is seven plus five?"),
    }
    return _taken(family, asked)


def _taken(family: str, asked: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Those that the family takes."""
    recipe = ALL_FAMILIES[family]
    refused = {"mixed media"} if not recipe.mixes_kinds else set()
    refused |= {"text", "long text"} if recipe.needs_picture else set()
    refused |= _OF_SEVERAL if recipe.one_picture else set()
    refused |= {"two videos"} if not recipe.several_videos else set()
    refused |= {"turns"} if not recipe.takes_turns else set()
    refused |= {"turns", "five", "tiny"} if recipe.stacks_pictures else set()
    return {name: messages for name, messages in asked.items() if name not in refused}


_OF_SEVERAL = {"two", "video", "turns", "five", "tiny", "same twice", "two videos", "video with rate", "mixed media"}
"""Questions about several pictures, or a video's frames."""


def more_questions(family: str) -> dict[str, list[dict[str, Any]]]:
    """Rarer shapes, for the full matrix: turns, a system text, many and extreme pictures, two videos."""
    turns = [
        {"role": "system", "content": [{"type": "text", "text": "Answer briefly."}]},
        *user(picture(24, 24, 21), "what is this?"),
        {"role": "assistant", "content": [{"type": "text", "text": "a gauge"}]},
        *user("and", picture(40, 16, 22), "?"),
    ]
    if ALL_FAMILIES[family].only_videos_of is not None:
        return {}
    other = 4 if ALL_FAMILIES[family].stacks_videos else 7
    asked = {
        "turns": turns,
        "five": user(*(picture(16 + 8 * i, 56 - 8 * i, 30 + i) for i in range(5)), "which is red?"),
        "tiny": user(picture(9, 9, 41), picture(200, 150, 42), "left or right?"),
        "same twice": user(picture(32, 24, 1), picture(32, 24, 1), "same?"),
        "two videos": user(video(4, 16, 24, 51), video(other, 32, 16, 52), "first or second?"),
        "video with rate": _with_rate(user(video(6, 24, 24, 53), "what happens?"), fps=3.0),
        "mixed media": user(picture(24, 32, 61), video(5, 24, 24, 62), "compare"),
        "long text": user("describe the difference between the first picture and the second one. " * 12),
    }
    return _taken(family, asked)


def _with_rate(messages: list[dict[str, Any]], fps: float) -> list[dict[str, Any]]:
    """The messages with their videos' frame rate given."""
    for message in messages:
        for part in message["content"]:
            if part["type"] == "video":
                part["fps"] = fps
    return messages


class Made(Mapping[str, Path]):
    """What is made when it is first asked for."""

    def __init__(self, makers: Mapping[str, Callable[[], Path]]) -> None:
        self._makers = makers
        self._made: dict[str, Path] = {}

    def __getitem__(self, name: str) -> Path:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


class Bench:
    """Checkpoint, adapters and reference answers of one family."""

    def __init__(self, family: str, checkpoint: Path, folder: Path) -> None:
        self.family = family
        self.checkpoint = checkpoint
        self.questions = {**questions(family), **more_questions(family)}
        self.adapters: Mapping[str, Path] = Made(
            {
                name: partial(
                    make_adapter,
                    checkpoint,
                    folder / name.replace("+", "-"),
                    targets=recipe.targets,
                    rank=recipe.rank,
                    rank_pattern=recipe.rank_pattern,
                    seed=recipe.seed,
                )
                for name, recipe in RECIPES.items()
                if name not in ALL_FAMILIES[family].lacks
            }
        )
        self._expected: dict[tuple[Case, int], Completion] = {}

    def mixed(self, names: Iterable[str], adapters: Iterable[str] = ADAPTERS) -> list[Case]:
        """As `mixed`, of the adapters that the family has."""
        return mixed(names, [name for name in adapters if name == BASE or name in self.having(name)])

    def having(self, *adapters: str) -> list[str]:
        """Those of the adapters that the family has."""
        return [name for name in adapters if name not in ALL_FAMILIES[self.family].lacks]

    def llm(self, *adapters: str, **config: Any) -> LLM:
        """An engine with these adapters of the bench loaded, or all of them."""
        config.setdefault("max_model_len", ALL_FAMILIES[self.family].max_model_len)
        return LLM(self.checkpoint, {name: self.adapters[name] for name in adapters or self.adapters}, **config)

    def request(self, case: Case, num_tokens: int = NUM_TOKENS) -> ChatRequest:
        adapter = None if case.adapter == BASE else case.adapter
        return ChatRequest(self.questions[case.question], adapter, greedy(num_tokens))

    def expected(self, case: Case, num_tokens: int = NUM_TOKENS) -> Completion:
        """The reference answer: PEFT-merged, alone, by transformers."""
        key = (case, num_tokens)
        if key not in self._expected:
            token_ids, logits = merged_reference(
                self.checkpoint,
                self.adapters.get(case.adapter),
                self.questions[case.question],
                num_tokens,
                ignore_eos=True,
                frames_as_pictures=self.frames_as_pictures,
            )
            self._expected[key] = reference_completion(token_ids, logits)
        return self._expected[key]

    def num_prompt_tokens(self, case: Case) -> int:
        inputs = reference_inputs(processor_of(self.checkpoint), self.questions[case.question], self.frames_as_pictures)
        ids = inputs.get("input_ids", inputs.get("decoder_input_ids"))
        return 1 if ids is None else ids.shape[1]  # where a decoder starts

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values that one token takes in all layers that keep any, in float32."""
        text = AutoConfig.from_pretrained(self.checkpoint).get_text_config()
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
        num_layers = sum(kind not in ("linear_attention", "conv") for kind in kinds)
        return 2 * num_layers * text.num_key_value_heads * head_dim * torch.float32.itemsize

    def compare(self, cases: Sequence[Case], answers: Sequence[Any], num_tokens: int = NUM_TOKENS) -> Comparison:
        return compare(answers, [self.expected(case, num_tokens) for case in cases])

    def check(self, llm: LLM, cases: Sequence[Case], num_tokens: int = NUM_TOKENS) -> list[Completion]:
        """Serve the cases in one mixed batch; every answer must equal its reference. Returns the answers."""
        answers = llm.generate([self.request(case, num_tokens) for case in cases])
        assert_equal(self.compare(cases, answers, num_tokens), cases)
        for case, answer in zip(cases, answers, strict=True):
            assert answer.usage.prompt_tokens == self.num_prompt_tokens(case), case
        llm.check_integrity()
        return answers

    @property
    def frames_as_pictures(self) -> Any:
        """For families without video support: which frames of a video are shown as pictures."""
        if ALL_FAMILIES[self.family].takes_videos:
            return None
        return evenly_sampled(NUM_SAMPLED_FRAMES)


def greedy(num_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, return_logits=True)


def mixed(names: Iterable[str], adapters: Iterable[str] = ADAPTERS) -> list[Case]:
    """Every question for every adapter, neighbours with different adapters."""
    adapters = list(adapters)
    return [Case(name, adapter) for name in names for adapter in adapters]


def step(llm: LLM, answers: dict[str, Completion]) -> None:
    """One step of the engine; answers that end with it are added by their request's id."""
    for output in llm.engine.step():
        assert output.error is None
        if output.delta is not None and output.delta.completion is not None:
            answers[output.request_id] = output.delta.completion


def reference_completion(token_ids: Sequence[int], logits: torch.Tensor) -> Completion:
    """A reference answer in the form `compare` takes."""
    usage = Usage(prompt_tokens=0, completion_tokens=len(token_ids))
    return Completion("", tuple(token_ids), FinishReason.LENGTH, usage, logits=tuple(logits))


def assert_equal(comparison: Comparison, cases: Sequence[Case]) -> None:
    """Fail with the cases that differ named."""
    listed = "\n".join(comparison.differences)
    named = "\n".join(f"{index}: {case.question} / {case.adapter}" for index, case in enumerate(cases))
    assert comparison.ok, (
        f"{comparison.num_ties} ties, largest error {comparison.max_logit_error:.3g}\n{listed}\n{named}"
    )
