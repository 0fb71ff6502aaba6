"""Whether a text model calls a layer's module on one row a token."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from polylens.core import Component, LayerKind, LayerSpec
from polylens.hosts.vllm.reach import fault_of_calls, record_calls


def spec(kind: LayerKind) -> LayerSpec:
    return LayerSpec("layer", Component.LANGUAGE_MODEL, kind, 4, 4)


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        (LayerKind.LINEAR, [(5, 4)]),
        (LayerKind.NORM, [(5, 4), (5, 4)]),
        (LayerKind.NORM, [(1, 5, 4)]),
        (LayerKind.HEAD_NORM, [(5, 3, 4)]),
        (LayerKind.EMBEDDING, [(5,)]),
    ],
)
def test_one_row_a_token_is_no_fault(kind: LayerKind, shapes: list[tuple[int, ...]]):
    assert fault_of_calls(spec(kind), shapes, 5) is None


@pytest.mark.parametrize(
    ("kind", "shapes", "words"),
    [
        (LayerKind.LINEAR, [], "without calling its module"),
        (LayerKind.LINEAR, [(5, 4), (10, 4)], r"\[5, 10\] rows for 5 tokens"),
        (LayerKind.HEAD_NORM, [(15, 4)], r"\[15\] rows"),
    ],
)
def test_other_calls_are_told(kind: LayerKind, shapes: list[tuple[int, ...]], words: str):
    fault = fault_of_calls(spec(kind), shapes, 5)
    assert fault is not None
    assert re.search(words, fault)


def test_calls_are_recorded_and_the_modules_left_as_they_were():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    own = model[1].forward = model[1].forward
    with record_calls(model, ["0", "1"]) as calls:
        model(torch.zeros(5, 4))
    assert calls == {"0": [(5, 4)], "1": [(5, 4)]}
    assert "forward" not in model[0].__dict__
    assert model[1].__dict__["forward"] is own
