"""What `polylens demo` does: every held-out picture to the base model and to every adapter, in one batch.

Then the same requests against one merged model an adapter, which must answer the same, and the times of both.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from polylens.core import ChatRequest, SamplingParams
from polylens.demo.data import BASE, DOMAINS, PROMPT, adapter_paths, heldout, model_path, score

if TYPE_CHECKING:
    from pathlib import Path

    from PIL.Image import Image

    from polylens.core import Completion
    from polylens.engine.llm import LLM

MAX_ANSWER_TOKENS = 16
"""`{"value": 123}` and the end token are 9 tokens."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Question:
    """One picture put to one adapter (`base`: none)."""

    adapter: str
    domain: str
    position: int  # in the domain's held-out set
    picture: Image
    label: str


@dataclass(frozen=True)
class Parity:
    """The mixed batch against the merged models, by the project's definition of equal."""

    max_logit_error: float
    tokens_equal: bool
    ties: int


@dataclass(frozen=True)
class DemoResult:
    """Seconds are of generating alone, without loading or merging."""

    questions: Sequence[Question]
    answers: Sequence[str]
    parity: Parity
    mixed_batch_s: float
    merged_runs_s: float
    one_merged_s: float
    accuracy: Mapping[str, Mapping[str, float]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "accuracy", _accuracy(self.questions, self.answers))

    def to_json(self) -> dict[str, Any]:
        return {
            "accuracy": self.accuracy,
            "parity": {
                "max_logit_error": self.parity.max_logit_error,
                "tokens_equal": self.parity.tokens_equal,
                "ties": self.parity.ties,
            },
            "mixed_batch_s": self.mixed_batch_s,
            "merged_runs_s": self.merged_runs_s,
            "adapters": len(self.accuracy) - 1,
            "requests": len(self.questions),
        }


def run_demo(
    per_domain: int | None = None, contact_sheet: Path | None = None, on_progress: Progress = lambda message: None
) -> DemoResult:
    """Serve, compare and time. `per_domain`: pictures a domain, None for all of them."""
    from polylens.engine.llm import LLM

    # The model is so small that a second thread gains nothing, and on a busy machine threads wait for each other.
    torch.set_num_threads(1)
    questions = list_questions(per_domain)
    on_progress("loading the model and its adapters")
    with LLM(model_path(), adapter_paths(), dtype="float32") as llm:
        _warm_up(llm, questions)
        on_progress(f"one mixed batch of {len(questions)} requests")
        mixed, mixed_s = _timed(llm, [_request(question) for question in questions])
    runs = _run_merged(questions, mixed, on_progress)
    result = DemoResult(
        questions=questions,
        answers=[completion.text for completion in mixed],
        parity=runs.parity,
        mixed_batch_s=mixed_s,
        merged_runs_s=runs.seconds,
        one_merged_s=runs.one_model_s,
    )
    if contact_sheet is not None:
        from polylens.demo.contact_sheet import draw

        on_progress(f"contact sheet {contact_sheet}")
        draw(result).save(contact_sheet)
    return result


def list_questions(per_domain: int | None) -> list[Question]:
    """Every picture to every adapter; neighbours use different adapters, as requests of many users do."""
    return [
        Question(adapter, domain, position, picture, label)
        for domain in DOMAINS
        for position, (picture, label) in enumerate(heldout(domain)[:per_domain])
        for adapter in (BASE, *adapter_paths())
    ]


def _request(question: Question, picture: Image | None = None, use_adapter: bool = True) -> ChatRequest:
    content = [{"type": "image", "image": picture or question.picture}, {"type": "text", "text": PROMPT}]
    return ChatRequest(
        messages=[{"role": "user", "content": content}],
        adapter=question.adapter if use_adapter and question.adapter != BASE else None,
        sampling=SamplingParams(max_tokens=MAX_ANSWER_TOKENS, temperature=0.0, return_logits=True),
    )


def _timed(llm: LLM, requests: Sequence[ChatRequest]) -> tuple[list[Completion], float]:
    started = time.perf_counter()
    completions = llm.generate(requests)
    elapsed = time.perf_counter() - started
    return cast("list[Completion]", completions), elapsed  # errors raise: the requests are our own


def _warm_up(llm: LLM, questions: Sequence[Question]) -> None:
    """The first call pays for library set-up. A picture of its own, so that no cache helps the measured run."""
    llm.generate([_request(questions[0], picture=_with_mark(questions[0].picture, 255))])


@dataclass
class _MergedRuns:
    parity: Parity
    seconds: float
    one_model_s: float


def _run_merged(questions: Sequence[Question], mixed: Sequence[Completion], on_progress: Progress) -> _MergedRuns:
    """One model at a time: its own requests, compared; the first adapter's also as many as the mixed batch had."""
    from polylens.engine.compare import compare

    theirs: list[Completion] = []
    ours: list[Completion] = []
    seconds = one_model_s = 0.0
    for name, path in {BASE: None, **adapter_paths()}.items():
        on_progress(f"the same requests of {name} on its merged model")
        chosen = [index for index, question in enumerate(questions) if question.adapter == name]
        with _merged(path) as llm:
            _warm_up(llm, questions)
            completions, elapsed = _timed(llm, [_request(questions[i], use_adapter=False) for i in chosen])
            if path is not None and not one_model_s:
                on_progress(f"{len(questions)} requests on that one merged model")
                one_model_s = _timed(llm, _distinct(questions))[1]
        seconds += elapsed
        theirs += completions
        ours += [mixed[i] for i in chosen]
        gc.collect()  # models hold reference cycles, and memory should not grow with the number of adapters
    comparison = compare(ours, theirs)
    parity = Parity(comparison.max_logit_error, comparison.tokens_equal, comparison.num_ties)
    return _MergedRuns(parity, seconds, one_model_s)


def _merged(adapter: Path | None) -> LLM:
    from polylens.engine.llm import LLM
    from polylens.engine.merged import merged_llm

    if adapter is None:
        return LLM(model_path(), dtype="float32")
    return merged_llm(model_path(), adapter, dtype="float32")


def _distinct(questions: Sequence[Question]) -> list[ChatRequest]:
    """As many requests as the mixed batch, no picture twice: one model's vision cache would answer repeats,
    while adapters of the tower can share nothing."""
    seen: dict[tuple[str, int], int] = {}
    requests = []
    for question in questions:
        key = (question.domain, question.position)
        seen[key] = seen.get(key, -1) + 1
        requests.append(_request(question, picture=_with_mark(question.picture, seen[key]), use_adapter=False))
    return requests


def _with_mark(picture: Image, value: int) -> Image:
    """The picture with another corner pixel: other content for the caches, the same to read."""
    marked = picture.copy()
    marked.putpixel((0, 0), (value, value, value))
    return marked


def _accuracy(questions: Sequence[Question], answers: Sequence[str]) -> dict[str, dict[str, float]]:
    right: dict[str, dict[str, list[bool]]] = {}
    for question, answer in zip(questions, answers, strict=True):
        marks = right.setdefault(question.adapter, {}).setdefault(question.domain, [])
        marks.append(score(answer, question.label, question.adapter))
    return {
        adapter: {domain: sum(marks) / len(marks) for domain, marks in domains.items()}
        for adapter, domains in right.items()
    }
