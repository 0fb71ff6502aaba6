"""A benchmark's answer: one JSON line, with what it was measured on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
import transformers

from polylens.native.processor import processor_name


@dataclass(frozen=True)
class Result:
    """`question` answered by `value` in `unit`.

    ratio, a, b: where there are two sides, their medians and a / b; the question names them in this order.
    goal: the largest acceptable ratio (value, where there is one side); `smallest` turns it into the smallest.
    None: the figure has no goal.
    """

    question: str
    value: float
    unit: str
    hardware: str
    ratio: float | None = None
    goal: float | None = None
    a: float | None = None
    b: float | None = None
    smallest: bool = False

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        figure = self.value if self.ratio is None else self.ratio
        return figure >= self.goal if self.smallest else figure <= self.goal

    def to_json(self) -> str:
        fields = asdict(self) | {"met": self.met}
        del fields["smallest"]
        return json.dumps({name: _rounded(fields[name]) for name in _ORDER}, ensure_ascii=False)


_ORDER = ("question", "value", "unit", "ratio", "goal", "met", "a", "b", "hardware")


def _rounded(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def two_sided(
    question: str, a: float, b: float, unit: str, hardware: str, goal: float | None, *, smallest: bool = False
) -> Result:
    """The question's first side is `a`, its second `b`; the value is `a`."""
    return Result(question, a, unit, hardware, ratio=a / b, goal=goal, a=a, b=b, smallest=smallest)


def hardware(device: str, dtype: torch.dtype) -> str:
    """Processor, threads, number format and versions, in one line."""
    number = str(dtype).removeprefix("torch.")
    where = f"{processor_name()}, {torch.get_num_threads()} threads"
    if torch.device(device).type == "cuda":
        where = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    return f"{where}, {number}, torch {torch.__version__}, transformers {transformers.__version__}"
