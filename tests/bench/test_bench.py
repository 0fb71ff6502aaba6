"""Every benchmark on the tiny model: that it runs and what its lines look like. Never how fast."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from polylens.bench.recipe import TINY, adapter_folder, model_folder
from polylens.bench.result import Result
from polylens.bench.run import BENCHMARKS, run_benchmark
from polylens.bench.setting import Setting
from polylens.bench.sides import alternate
from polylens.errors import RequestError

KEYS = ["question", "value", "unit", "ratio", "goal", "met", "a", "b", "hardware"]
PARTS = [(name, part) for name, parts in BENCHMARKS.items() for part in parts]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_every_question_is_answered_in_the_published_form(name: str, part: str, cache: Path) -> None:
    results = list(run_benchmark(name, Setting(quick=True, rounds=1, cache=cache), part))
    assert results
    for result in results:
        line = json.loads(result.to_json())
        assert list(line) == KEYS
        assert line["question"]
        assert math.isfinite(line["value"])
        assert "torch" in line["hardware"]
        assert (line["goal"] is None) == (line["met"] is None)
        if line["ratio"] is not None:
            assert line["ratio"] == pytest.approx(line["a"] / line["b"], rel=1e-3)
            assert " vs " in line["question"]
            assert line["value"] == line["a"]
        else:
            assert line["a"] is line["b"] is None


def test_one_encoder_run_serves_adapters_that_leave_the_tower_alone(cache: Path) -> None:
    [result] = run_benchmark("adapters", Setting(quick=True, rounds=1, cache=cache), "shared-picture")
    assert result.value == 1
    assert result.met


def test_wrong_names_list_the_right_ones(cache: Path) -> None:
    setting = Setting(quick=True, cache=cache)
    with pytest.raises(RequestError, match="prefill, decode"):
        list(run_benchmark("speed", setting))
    with pytest.raises(RequestError, match="picture, four-adapters"):
        list(run_benchmark("prefill", setting, "everything"))


def test_goals() -> None:
    def result(**changes: object) -> Result:
        return Result(**({"question": "a vs b", "value": 2.0, "unit": "s", "hardware": "x"} | changes))  # type: ignore[arg-type]

    assert result().met is None
    assert result(goal=2.0).met is True
    assert result(goal=1.9).met is False
    assert result(goal=1.1, ratio=1.0).met is True  # where there are two sides, the goal is the ratio's
    assert result(goal=1.1, ratio=1.2).met is False
    assert result(goal=0.97, ratio=1.2, smallest=True).met is True
    assert result(goal=0.97, ratio=0.9, smallest=True).met is False


def test_sides_take_turns_and_the_first_round_does_not_count() -> None:
    seen: list[str] = []
    times = iter([100.0, 100.0, 1.0, 10.0, 20.0, 2.0, 3.0, 30.0])

    def side(name: str) -> float:
        seen.append(name)
        return next(times)

    medians = alternate([lambda: side("a"), lambda: side("b")], 3)
    assert "".join(seen) == "baabbaab"
    assert medians == [2.0, 20.0]


def test_model_and_adapters_are_built_once_and_whole(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, adapter = model_folder(TINY, cache), adapter_folder(TINY, rank=4, seed=1, cache=cache)
    monkeypatch.setattr("polylens.bench.recipe.build_model", lambda *_: pytest.fail("built again"))
    monkeypatch.setattr("polylens.bench.recipe.build_adapter", lambda *_a, **_k: pytest.fail("built again"))
    assert model_folder(TINY, cache) == model
    assert adapter_folder(TINY, rank=4, seed=1, cache=cache) == adapter
    assert {path.name for path in model.parent.iterdir()} >= {"model", adapter.name}
    assert not [path for path in model.parent.iterdir() if path.name.startswith("tmp")]


def test_the_adapter_covers_every_linear_layer(cache: Path) -> None:
    with Setting(quick=True, cache=cache).dynamic({"one": adapter_folder(TINY, rank=4, seed=1, cache=cache)}) as llm:
        linear = {name for name, module in llm.loaded.model.named_modules() if isinstance(module, torch.nn.Linear)}
        assert set(llm.registry.get("one").deltas) == linear


def test_prompts_have_the_stated_lengths(cache: Path) -> None:
    setting = Setting(quick=True, cache=cache)
    side = setting.sizes.picture_side // (TINY.patch * TINY.merge)
    with setting.dynamic({}) as llm:
        prepared = llm.engine.prepare(setting.picture_request(None), adapter=None)
    assert len(prepared.prompt.token_ids) == side * side + 2 + setting.sizes.text_tokens
