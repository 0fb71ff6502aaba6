"""What happens when a layer's rows are not divided as believed: an error or the slow path, never a wrong answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polylens import LLM
from polylens.disk_cache import CACHE_VARIABLE
from polylens.engine import engine as engine_module
from polylens.errors import RowRuleError
from polylens.models.probe import ProbeResult
from polylens.models.row_rules import RowRule
from tests.families.build import FAMILIES, VIDEO_FAMILIES
from tests.parity.harness import BASE, RECIPES, Bench, Case, mixed


def test_a_planted_wrong_rule_raises(bench: Bench, plant: Callable[[RowRule], None]) -> None:
    """The engine checks every call's row count against the layer's rule before it uses the result."""
    # Pictures of 160, 40 and 72 patches: three does not divide their sum. Fixed-size pictures divide evenly by
    # every proportional rule; there the number of calls is what is wrong.
    plant(RowRule.IMAGES if bench.family in VIDEO_FAMILIES else RowRule.PER_CALL)
    cases = [Case("wide", "tower"), Case("two", "all"), Case("text", BASE)]
    with bench.llm() as llm:
        answers = llm.generate([bench.request(case) for case in cases], on_error="return")
        assert any(isinstance(answer, RowRuleError) for answer in answers)
        # Whoever got an answer got the right one, and the engine goes on.
        for case, answer in zip(cases, answers, strict=True):
            assert isinstance(answer, RowRuleError) or bench.compare([case], [answer]).ok
        bench.check(llm, [Case("text", "all"), Case("picture", "all")])


def test_a_planted_rule_that_divides_evenly_is_seen_by_parity(
    bench_of: Callable[[str], Bench], plant: Callable[[RowRule], None]
) -> None:
    """Counts alone cannot tell: two pictures of 48 and 160 patches also divide as 104 and 104."""
    bench = bench_of("qwen2_vl")
    plant(RowRule.IMAGES)
    cases = [Case("picture", "tower"), Case("wide", "all")]
    with bench.llm() as llm:
        answers = llm.generate([bench.request(case) for case in cases])
    assert not bench.compare(cases, answers).ok


@pytest.mark.parametrize(
    "bench",
    [pytest.param(name, marks=() if name in ("qwen2_5_vl", "llava") else pytest.mark.full) for name in FAMILIES],
    indirect=True,
)
def test_a_layer_that_obeys_no_rule_costs_time_only(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rows reversed before a layer and put back after it: the same function, but the rows are other items'."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))  # rules of the untouched model do not hold here
    with LLM(bench.checkpoint) as llm:
        reversing = type(_tower_mlp(llm.loaded.model))
    # The class, not this model's module: the probe looks at a model of its own.
    monkeypatch.setattr(reversing, "forward", _reversing(reversing.forward))
    with bench.llm() as llm:
        assert llm.engine.probe is not None
        assert RowRule.UNPROVEN in llm.engine.probe.rules.values()
        assert not llm.engine.vision.mixed
        bench.check(llm, mixed(["picture", "two", "video", "text"]))
        # Pictures and videos of four adapters and base, each adapter in runs of its own.
        assert llm.engine.vision.num_runs >= len(RECIPES) + 1


def test_all_rules_are_proven_by_the_probe(bench: Bench) -> None:
    """No per-family count formulas: the probe alone finds a rule for every layer of the five families."""
    with bench.llm() as llm:
        probe = llm.engine.probe
        assert probe is not None
        assert llm.engine.vision.mixed
        assert not probe.reasons
        unused = probe.layers_with(RowRule.NO_EFFECT)
    # LLaVA takes its features before the last CLIP layer; everything else of every family is used.
    assert (bench.family == "llava") == bool(unused)
    assert all(".layers.2." in name or name.endswith(".post_layernorm") for name in unused)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[RowRule], None]:
    """`plant(rule)`: engines made afterwards believe that every proven encoder layer obeys `rule`."""
    find = engine_module.find_row_rules

    def with_rule(rule: RowRule) -> None:
        def planted(*args: Any, **kwargs: Any) -> ProbeResult:
            found = find(*args, **kwargs)
            rules = {name: old if old is RowRule.NO_EFFECT else rule for name, old in found.rules.items()}
            return dataclasses.replace(found, rules=rules)

        monkeypatch.setattr(engine_module, "find_row_rules", planted)

    return with_rule


def _tower_mlp(model: nn.Module) -> nn.Module:
    """An MLP in the middle of the vision tower."""
    names = ("visual.blocks.1.mlp", "vision_tower.vision_model.encoder.layers.1.mlp", "encoder.layers.1.mlp")
    return next(module for name, module in model.named_modules() if name.endswith(names) and "language" not in name)


def _reversing(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def reversed_rows(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        return forward(mlp, rows.flip(0)).flip(0).view(x.shape)

    return reversed_rows
