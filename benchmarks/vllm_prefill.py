"""Time to first token inside vLLM: an adapter applied by polylens against the same adapter merged into the weights.

    python benchmarks/vllm_prefill.py --vllm-python PATH [--vllm-pythonpath DIRS] [--rounds N] [--stock-rounds N]

Runs in polylens' own environment, which makes the files; vLLM runs in its own (PATH), one process a side:

- merged: vLLM as it is, over a checkpoint into which PEFT merged the adapter;
- polylens: the adapter, by polylens' worker (docs/vllm.md);
- operations: the adapter, by vLLM's own LoRA with polylens' CPU operations;
- stock: the adapter, by vLLM's own LoRA.

Model, picture and text are those of `polylens bench prefill`; the adapter is on every linear layer but the head, which
vLLM's LoRA does not take. In a round the sides are asked in turns for the same new picture, in the next one backwards;
reported are medians. Stock took more than 100 s a prompt on two cores, and so takes part in the first rounds only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoProcessor

from polylens.bench.recipe import Recipe
from polylens.bench.setting import Setting

SIDES: Mapping[str, dict[str, str]] = {
    "merged": {},
    "polylens": {"lora": "polylens"},
    "operations": {"lora": "vllm", "POLYLENS_VLLM_CPU_LORA": "1"},
    "stock": {"lora": "vllm"},
}
"""Whose LoRA, and more of the environment."""
GOAL = 1.05
"""Of polylens by merged."""
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
MAX_MODEL_LEN = 4096
WARM_UP_TOKENS = 64
QUICK_RECIPE = Recipe(
    hidden=128, layers=2, intermediate=256, heads=2, tower_width=128, tower_layers=2, tower_heads=2, tower_mlp_ratio=2
)
"""Small, but with heads of 64, which vLLM's attention on a CPU takes."""


class Side:
    """One vLLM in a process of its own, asked over its input and output."""

    def __init__(self, process: subprocess.Popen[str], job: Mapping[str, Any], log: Path) -> None:
        self._process = process
        self._log = log
        self.started = self._ask(job)

    def run(self, request: Mapping[str, Any]) -> tuple[float, list[int]]:
        """(seconds, tokens) of one request."""
        answer = self._ask([request])
        return answer["seconds"], answer["tokens"][0]

    def _ask(self, line: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(line)}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"vLLM failed:\n{self._log.read_text(errors='replace')[-3000:]}")
        return json.loads(answer)


@contextmanager
def start_side(
    command: Sequence[str], path: str, log: Path, job: Mapping[str, Any], environment: Mapping[str, str]
) -> Iterator[Side]:
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": path, **environment},
            text=True,
        ) as process,
    ):
        try:
            yield Side(process, job, log)
        finally:
            process.kill()  # vLLM's threads need not be waited for


def merge(model: Path, adapter: Path, folder: Path) -> Path:
    """The checkpoint of `model` with `adapter` merged into it by PEFT."""
    base: Any = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    PeftModel.from_pretrained(base, str(adapter)).merge_and_unload().save_pretrained(folder)
    AutoProcessor.from_pretrained(model).save_pretrained(folder)
    return folder


@dataclass
class Measured:
    """A side's times (seconds) and tokens, by round."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)


def measure(
    sides: Mapping[str, Side], requests: Sequence[Mapping[str, Any]], rounds: Mapping[str, int]
) -> dict[str, Measured]:
    """Every round a request, in the sides that have as many rounds."""
    measured = {name: Measured() for name in sides}
    for turn, request in enumerate(requests):
        taking_part = [name for name in sides if turn < rounds[name]]
        for name in taking_part if turn % 2 == 0 else reversed(taking_part):
            took, tokens = sides[name].run(request)
            measured[name].seconds.append(took)
            measured[name].tokens.append(tokens)
            print(f"{name}: {took:.2f} s", file=sys.stderr, flush=True)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", required=True, help="Python of an environment with vLLM's CPU build")
    parser.add_argument("--vllm-pythonpath", default="", help="PYTHONPATH of that Python, for what it needs to start")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stock-rounds", type=int, default=1, help="of vLLM's own LoRA; 0 leaves it out")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to try the form")
    parser.add_argument("--json", action="store_true", help="one JSON line a side instead of the table")
    arguments = parser.parse_args()
    setting = Setting(quick=arguments.quick)
    setting.recipe = QUICK_RECIPE if arguments.quick else Recipe()
    with tempfile.TemporaryDirectory() as folder:
        run(setting, arguments, Path(folder))


def run(setting: Setting, arguments: argparse.Namespace, folder: Path) -> None:
    adapter = setting.adapter(1, targets="layers")
    merged = merge(setting.model, adapter, folder / "merged")
    command = [arguments.vllm_python, str(Path(__file__).with_name("peers_vllm.py"))]

    def side(name: str, lora: str | None = None, **environment: str) -> Any:
        job = {
            "model": str(setting.model if lora else merged),
            "adapter": str(adapter) if lora else None,
            "lora": lora,
            "rank": max(8, setting.sizes.rank),  # vLLM allows no smaller bound
            "threads": torch.get_num_threads(),
            "eager": True,
            "max_model_len": MAX_MODEL_LEN,
        }
        print(f"{name} starts …", file=sys.stderr, flush=True)
        return start_side(command, arguments.vllm_pythonpath, folder / f"{name}.log", job, environment)

    rounds = dict.fromkeys(("merged", "polylens", "operations"), arguments.rounds)
    rounds |= {"stock": min(arguments.stock_rounds, arguments.rounds)} if arguments.stock_rounds else {}
    with ExitStack() as stack:
        sides = {name: stack.enter_context(side(name, **SIDES[name])) for name in rounds}
        requests = list(prompts(setting, folder, arguments.rounds + 1))
        measure(sides, [short(setting)], dict.fromkeys(sides, 1))
        measure(sides, requests[:1], {name: int(name != "stock") for name in sides})
        measured = measure(sides, requests[1:], rounds)
        version = sides["merged"].started
    report(setting, measured, as_json=arguments.json)
    if not arguments.json:
        print(f"\nvLLM {version['version']}, torch {version['torch']}, {setting.hardware}; model {setting.recipe.key}")


def prompts(setting: Setting, folder: Path, count: int) -> Iterator[dict[str, Any]]:
    """The prompt of the published figures, each time with a picture of its own."""
    for number in range(count):
        file = folder / f"{number}.png"
        setting.picture(setting.sizes.picture_side, number).save(file)
        yield {"prompt": f"{IMAGE}{setting.text(setting.sizes.text_tokens)}", "picture": str(file), "tokens": 1}


def short(setting: Setting) -> dict[str, Any]:
    """A request that loads the adapter and starts the threads."""
    return {"prompt": setting.text(WARM_UP_TOKENS), "picture": None, "tokens": 2}


def report(setting: Setting, measured: Mapping[str, Measured], *, as_json: bool) -> None:
    if not as_json:
        print("| side | time to first token | by merged | rounds | first tokens |\n|---|---|---|---|---|")
    reference = measured["merged"]
    for name, side in measured.items():
        took, goal = median(side.seconds), GOAL if name == "polylens" else None
        ratio = took / median(reference.seconds)
        same = side.tokens == reference.tokens[: len(side.tokens)]
        if as_json:
            line = {"side": name, "seconds": took, "ratio": ratio, "goal": goal, "rounds": len(side.seconds)}
            print(json.dumps({**line, "agrees": same, "hardware": setting.hardware}))
        else:
            shown = f"{ratio:.3f}" + (f" (goal {goal})" if goal else "")
            print(f"| {name} | {took:.2f} s | {shown} | {len(side.seconds)} | {'same' if same else 'others'} |")


if __name__ == "__main__":
    main()
