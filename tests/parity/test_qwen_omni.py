"""Models that also hear: sounds are refused, adapters on what hears have no effect, whole checkpoints load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from polylens import LLM
from polylens.config import EngineConfig
from polylens.engine.merge_checkpoint import merge_checkpoint
from polylens.errors import RequestError
from polylens.models.loading import load_model
from polylens.models.parts import audio_path
from polylens.models.probe_model import find_row_rules
from polylens.models.row_rules import RowRule
from tests.families.adapters import make_adapter
from tests.families.media import picture, user
from tests.parity.harness import BASE, Bench, Case, assert_equal, greedy

THINKERS = {"qwen2_5_omni_thinker": "qwen2_5_omni", "qwen3_omni_moe_thinker": "qwen3_omni_moe"}
"""Model types, and those of the checkpoints that are published, which can speak too."""


@pytest.fixture(params=THINKERS)
def bench(request: pytest.FixtureRequest, bench_of: Callable[[str], Bench]) -> Bench:
    return bench_of(request.param)


def test_an_adapter_on_what_hears_loads_and_changes_nothing(bench: Bench, tmp_path: Path) -> None:
    adapter = make_adapter(bench.checkpoint, tmp_path, targets="sounds", seed=5)
    question = user(picture(32, 24, 1), "what is it?")
    with LLM(bench.checkpoint) as llm:
        report = llm.load_adapter("ears", adapter)
        assert len(report.no_effect) > 10
        assert all("audio_tower" in name for name in report.no_effect)
        plain, changed = (llm.chat(question, name, greedy(3)) for name in (None, "ears"))
        assert plain.token_ids == changed.token_ids


def test_sounds_are_refused_by_name(bench: Bench) -> None:
    sound = {"type": "audio", "audio": np.zeros(1600, dtype=np.float32)}
    with LLM(bench.checkpoint) as llm, pytest.raises(RequestError, match=r"must be one of text, image.*'audio'"):
        llm.chat([{"role": "user", "content": [sound]}])


def test_a_cut_copy_says_the_same_of_what_hears(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    loaded = load_model(checkpoint("qwen2_5_omni_thinker"), EngineConfig())
    whole, cut = (find_row_rules(loaded, cache_dir=tmp_path, max_parameters=most) for most in (10**9, 0))
    assert whole.rules == cut.rules
    hears = {rule for name, rule in cut.rules.items() if name.startswith(f"{audio_path(loaded.model)}.")}
    assert hears == {RowRule.NO_EFFECT}


def test_a_whole_checkpoint_is_served_by_its_thinker(bench: Bench, tmp_path: Path) -> None:
    whole = _as_published(bench.checkpoint, tmp_path, THINKERS[bench.family])
    cases = [Case(question, adapter) for question in ("picture", "video") for adapter in (BASE, "all")]
    with LLM(whole, {"all": bench.adapters["all"]}) as llm:
        answers = llm.generate([bench.request(case, 3) for case in cases])
    assert_equal(bench.compare(cases, answers, 3), cases)


def test_a_whole_checkpoint_is_merged(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = _as_published(bench.checkpoint, tmp_path / "whole", THINKERS[bench.family])
    merge_checkpoint(whole, bench.adapters["tower"], tmp_path / "merged")
    assert "talker.model.norm.weight" in load_file(tmp_path / "merged" / "model.safetensors")
    case = Case("picture", "tower")
    with LLM(tmp_path / "merged") as llm:
        answer = llm.chat(bench.questions["picture"], sampling=greedy(3))
    assert_equal(bench.compare([case], [answer], 3), [case])


def _as_published(thinker: Path, folder: Path, model_type: str) -> Path:
    """The thinker, whose files have the published names, beside weights of a part that speaks."""
    for file in thinker.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((thinker / "config.json").read_text())
    published = {"model_type": model_type, "thinker_config": config, "enable_audio_output": False}
    (folder / "config.json").write_text(json.dumps(published))
    tensors = load_file(thinker / "model.safetensors")
    renamed = {f"thinker.{name}": tensor for name, tensor in tensors.items()}
    spoken = next(iter(tensors.values())).clone()
    save_file({**renamed, "talker.model.norm.weight": spoken}, folder / "model.safetensors", {"format": "pt"})
    return folder
