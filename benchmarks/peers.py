"""The same checkpoint, adapter and requests through polylens, transformers + PEFT, and vLLM's CPU build.

    python benchmarks/peers.py [--vllm-python PATH [--vllm-pythonpath DIR]] [--rounds N] [--quick]

Each engine runs alone, with the same number of threads and in float32; the clock starts when a request is handed in,
its picture not yet processed. Every adapter runs alone too: vLLM's CPU build gives base rows of a mixed batch the last
adapter, and PEFT's mixed batches are wrong for pictures. Greedy tokens must agree, or the row says that they do not.

It prints one table, with the rows that polylens loses, and one JSON line a figure with `--json`. What it measures is a
small random model on a CPU: that path is not vLLM's main target, and nothing is said about GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from polylens import LLM, ChatRequest, SamplingParams, __version__
from polylens.bench.recipe import Recipe
from polylens.bench.setting import Setting

QUICK_RECIPE = Recipe(
    hidden=128, layers=2, intermediate=256, heads=2, tower_width=128, tower_layers=2, tower_heads=2, tower_mlp_ratio=2
)
"""Small, but with heads of 64, which vLLM's attention on a CPU takes."""
WARM_UP_TOKENS = 64
"""Text of the one short request that every engine answers first: it loads the adapter and starts the threads."""
VLLM_TIMEOUT_S = 1800
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@dataclass(frozen=True)
class Request:
    """One request as every engine can take it. picture: side in pixels, or 0 for none."""

    text: str
    picture: int
    tokens: int


@dataclass(frozen=True)
class Workload:
    """A batch, and how its time becomes a figure: whole, or for each of its decode steps.

    A decode figure is the time of the batch less that of the same batch with one token, by the steps between.
    """

    name: str
    batch: tuple[Request, ...]
    adapter: bool
    decode: bool = False
    goal: float | None = None
    """Time of polylens by vLLM's, at most."""

    @property
    def first_tokens(self) -> tuple[Request, ...]:
        return tuple(Request(one.text, one.picture, 1) for one in self.batch)

    @property
    def steps(self) -> int:
        return self.batch[0].tokens - 1


@dataclass
class Measured:
    """One engine's times (seconds, one a round) and greedy tokens of one batch."""

    times: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.times)


Engine = Callable[[Sequence[tuple[Request, ...]], bool], list[Measured]]
"""Runs batches with the adapter or without, after a warm-up, several rounds."""


def workloads(setting: Setting) -> list[Workload]:
    sizes = setting.sizes
    long = (Request(setting.text(sizes.text_tokens), sizes.picture_side, 1),)
    short = tuple(Request(setting.text(64, seed), 0, sizes.decode_steps + 1) for seed in range(8))
    return [
        Workload("base: first token", long, adapter=False, goal=0.9),
        Workload("base: decode step, 8 sequences", short, adapter=False, decode=True, goal=0.5),
        Workload("adapter: first token", long, adapter=True, goal=0.2),
        Workload("adapter: decode step, 8 sequences", short, adapter=True, decode=True),
    ]


def warm_up(setting: Setting) -> tuple[Request, ...]:
    return (Request(setting.text(WARM_UP_TOKENS), 0, 2),)


# polylens


class Polylens:
    def __init__(self, setting: Setting, rounds: int) -> None:
        self._setting = setting
        self._rounds = rounds
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.version = f"polylens {__version__}, {versions}, eager"

    def __call__(self, batches: Sequence[tuple[Request, ...]], adapter: bool) -> list[Measured]:
        adapters = {"adapter": self._setting.adapter(1, targets="layers")} if adapter else {}
        with LLM(self._setting.model, adapters, config=self._setting.config()) as llm:
            self._run(llm, warm_up(self._setting), adapter, 0)
            return [_rounds(partial(self._run, llm, batch, adapter), self._rounds) for batch in batches]

    def _run(self, llm: LLM, batch: tuple[Request, ...], adapter: bool, number: int) -> tuple[float, list[list[int]]]:
        requests = [self._request(one, "adapter" if adapter else None, number) for one in batch]
        start = time.perf_counter()
        answers = llm.generate(requests)
        return time.perf_counter() - start, [list(answer.token_ids) for answer in answers]

    def _request(self, one: Request, adapter: str | None, number: int) -> ChatRequest:
        media = [{"type": "image", "image": self._setting.picture(one.picture, number)}] if one.picture else []
        content = [*media, {"type": "text", "text": one.text}]
        return ChatRequest(
            [{"role": "user", "content": content}], adapter, SamplingParams(max_tokens=one.tokens, ignore_eos=True)
        )


def _rounds(run: Callable[[int], tuple[float, list[list[int]]]], rounds: int) -> Measured:
    """Each round has pictures of its own, so that no engine finds them processed."""
    measured = Measured()
    for number in range(rounds):
        took, measured.tokens = run(number)
        measured.times.append(took)
    return measured


# transformers + PEFT


class Transformers:
    """`generate` of a model with the adapter beside its weights. A batch is padded on the left."""

    def __init__(self, setting: Setting, rounds: int) -> None:
        import peft

        self._setting = setting
        self._rounds = rounds
        self.version = f"transformers {transformers.__version__}, peft {peft.__version__}, sdpa, eager"

    def __call__(self, batches: Sequence[tuple[Request, ...]], adapter: bool) -> list[Measured]:
        from peft import PeftModel

        model: Any = transformers.AutoModelForImageTextToText.from_pretrained(self._setting.model, dtype=torch.float32)
        if adapter:
            model = PeftModel.from_pretrained(model, str(self._setting.adapter(1, targets="layers")))
        processor = transformers.AutoProcessor.from_pretrained(self._setting.model)
        processor.tokenizer.padding_side = "left"
        model.eval().generation_config.eos_token_id = None
        self._run(model, processor, warm_up(self._setting), 0)
        return [_rounds(partial(self._run, model, processor, batch), self._rounds) for batch in batches]

    def _run(
        self, model: Any, processor: Any, batch: tuple[Request, ...], number: int
    ) -> tuple[float, list[list[int]]]:
        pictures = [self._setting.picture(one.picture, number) for one in batch if one.picture]
        texts = [f"{IMAGE if one.picture else ''}{one.text}" for one in batch]
        start = time.perf_counter()
        inputs = processor(text=texts, images=pictures or None, padding=True, return_tensors="pt")
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=batch[0].tokens, do_sample=False, pad_token_id=0)
        return time.perf_counter() - start, out[:, inputs["input_ids"].shape[1] :].tolist()


# vLLM


class Vllm:
    """vLLM's CPU build in a process and an environment of its own."""

    def __init__(
        self, setting: Setting, rounds: int, python: str, *, python_path: str, eager: bool, folder: Path
    ) -> None:
        self._setting = setting
        self._rounds = rounds
        self._python = python
        self._environment = {**os.environ, "PYTHONPATH": python_path}
        self._eager = eager
        self._folder = folder
        self.version = "vLLM"

    def __call__(self, batches: Sequence[tuple[Request, ...]], adapter: bool) -> list[Measured]:
        job = {
            "model": str(self._setting.model),
            "adapter": str(self._setting.adapter(1, targets="layers")) if adapter else None,
            "lora": "vllm",
            "rank": max(8, self._setting.sizes.rank),  # vLLM allows no smaller bound
            "threads": torch.get_num_threads(),
            "eager": self._eager,
            "max_model_len": 4096,
        }
        warming = [[self._request(one, 0) for one in warm_up(self._setting)]]
        timed = [[self._request(one, number) for one in batch] for batch in batches for number in range(self._rounds)]
        done = subprocess.run(
            [self._python, str(Path(__file__).with_name("peers_vllm.py"))],
            input="".join(f"{json.dumps(line)}\n" for line in (job, *warming, *timed)),
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=VLLM_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"vLLM failed:\n{done.stderr[-3000:]}")
        started, _, *runs = (json.loads(line) for line in done.stdout.splitlines())
        kind = "eager" if self._eager else "compiled"
        flags = json.dumps(started["flags"])
        self.version = f"vLLM {started['version']}, torch {started['torch']}, {kind}; flags {flags}"
        of_batch = [runs[start : start + self._rounds] for start in range(0, len(runs), self._rounds)]
        return [Measured([run["seconds"] for run in rounds], rounds[-1]["tokens"]) for rounds in of_batch]

    def _request(self, one: Request, number: int) -> dict[str, Any]:
        file = None
        if one.picture:
            file = self._folder / f"{one.picture}-{number}.png"
            self._setting.picture(one.picture, number).save(file)
        prompt = f"{IMAGE if one.picture else ''}{one.text}"
        return {"prompt": prompt, "picture": file and str(file), "tokens": one.tokens}


# The table


@dataclass(frozen=True)
class Row:
    """One workload in all engines: seconds, and whether the tokens agree with polylens'."""

    workload: Workload
    seconds: dict[str, float]
    agrees: dict[str, bool]


def measure(engines: dict[str, Engine], all_workloads: Sequence[Workload]) -> list[Row]:
    rows: dict[str, Row] = {workload.name: Row(workload, {}, {}) for workload in all_workloads}
    tokens: dict[str, list[list[int]]] = {}
    for name, engine in engines.items():
        for adapter in (False, True):
            chosen = [workload for workload in all_workloads if workload.adapter is adapter]
            batches = [batch for workload in chosen for batch in _batches(workload)]
            print(f"{name}: {'adapter' if adapter else 'base'} …", file=sys.stderr, flush=True)
            results = iter(engine(batches, adapter))
            for workload in chosen:
                measured = next(results)
                seconds = measured.median
                if workload.decode:
                    seconds = (seconds - next(results).median) / workload.steps
                rows[workload.name].seconds[name] = seconds
                rows[workload.name].agrees[name] = tokens.setdefault(workload.name, measured.tokens) == measured.tokens
    return list(rows.values())


def _batches(workload: Workload) -> Iterator[tuple[Request, ...]]:
    yield workload.batch
    if workload.decode:
        yield workload.first_tokens


def table(rows: Sequence[Row], engines: Sequence[str]) -> Iterator[str]:
    yield "| | " + " | ".join(engines) + " |"
    yield "|---|" + "---|" * len(engines)
    for row in rows:
        yield f"| {row.workload.name} | " + " | ".join(_cell(row, engine) for engine in engines) + " |"


def _cell(row: Row, engine: str) -> str:
    seconds, ours = row.seconds[engine], row.seconds["polylens"]
    shown = f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
    if engine == "polylens":
        return shown
    return f"{shown} ({ours / seconds:.2f})" + ("" if row.agrees[engine] else " other tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM's CPU build")
    parser.add_argument("--vllm-pythonpath", default="", help="PYTHONPATH of that Python, for what it needs to start")
    parser.add_argument("--vllm-compiled", action="store_true", help="let vLLM compile: no eager mode")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to try the form")
    parser.add_argument("--json", action="store_true", help="one JSON line a figure instead of the table")
    arguments = parser.parse_args()
    setting = Setting(quick=arguments.quick, rounds=arguments.rounds)
    setting.recipe = QUICK_RECIPE if arguments.quick else Recipe()
    with tempfile.TemporaryDirectory() as folder:
        engines: dict[str, Any] = {
            "polylens": Polylens(setting, arguments.rounds),
            "transformers + PEFT": Transformers(setting, arguments.rounds),
        }
        if arguments.vllm_python:
            eager = not arguments.vllm_compiled
            engines["vLLM (CPU)"] = Vllm(
                setting,
                arguments.rounds,
                arguments.vllm_python,
                python_path=arguments.vllm_pythonpath,
                eager=eager,
                folder=Path(folder),
            )
        rows = measure(engines, workloads(setting))
    if arguments.json:
        for row in rows:
            line = {
                "question": row.workload.name,
                "goal": row.workload.goal,
                "seconds": row.seconds,
                "agrees": row.agrees,
            }
            print(json.dumps({**line, "hardware": setting.hardware}))
        return
    print("\n".join(table(rows, list(engines))))
    print("\nIn brackets: time of polylens by that engine's; below 1 polylens is faster.")
    print(f"{setting.hardware}; model {setting.recipe.key}")
    for name, engine in engines.items():
        print(f"{name}: {engine.version}")


if __name__ == "__main__":
    main()
