"""Gemma 4's own ways: pictures seen both ways by windowed layers only, layers that share keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from polylens.config import EngineConfig
from polylens.engine.kv import MeasuredText
from polylens.models import loading
from polylens.models.families import FamilyNotes, TwoWay, notes_for
from polylens.models.loading import load_model
from tests.parity.harness import Bench, Case


@pytest.mark.parametrize("wrong", [{"two_way": TwoWay.NONE}, {"two_way_in_windows_only": False}])
def test_pictures_seen_otherwise_give_other_answers(
    wrong: dict, bench_of: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(model_type: str) -> FamilyNotes:
        return replace(notes_for(model_type), **wrong)

    monkeypatch.setattr(loading, "notes_for", planted)
    bench, case = bench_of("gemma4_large"), Case("picture", "base")
    with bench.llm() as llm:
        answers = llm.generate([bench.request(case, 4)])
    assert not bench.compare([case], answers, 4).ok


def test_layers_that_share_keys_and_values_keep_none(bench_of: Callable[[str], Bench]) -> None:
    layers = MeasuredText.of(load_model(bench_of("gemma4").checkpoint, EngineConfig())).layers
    assert {number: kv.key for number, kv in layers.items()} == {0: (2, 8), 1: (2, 16)}
