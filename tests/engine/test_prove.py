"""The proof at load: it holds where the engine is right, fails where it is wrong, and decides who computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polylens import LLM
from polylens.config import EngineConfig
from polylens.engine import prove as proving
from polylens.engine.prove import MAX_ERROR, MIN_CONTRAST, Proof, prove, settled
from polylens.models.families import TwoWay
from polylens.models.loading import LoadedModel, load_model, prepare_model
from polylens.models.stand_in import WINDOW, stand_in
from tests.parity.harness import Bench, Case, mixed

CheckpointOf = Callable[[str], Path]
LoadedOf = Callable[[str], LoadedModel]

PROVEN = ("gemma3", "internvl", "llava", "paligemma", "qwen2_5_vl", "qwen3_5", "qwen3_vl_moe")
"""One for each kind of mask, position, layer and feature."""


@pytest.fixture
def gemma3(checkpoint: CheckpointOf, tmp_path: Path) -> Bench:
    return Bench("gemma3", checkpoint("gemma3"), tmp_path)


@pytest.mark.parametrize("family", PROVEN)
def test_families_are_proven(family: str, loaded_of: LoadedOf, tmp_path: Path) -> None:
    proof = prove(loaded_of(family), cache_dir=tmp_path)
    assert proof.reason is None
    assert proof.error <= MAX_ERROR / 5
    assert proof.contrast >= MIN_CONTRAST * MAX_ERROR


def test_a_model_is_proven_on_the_same_numbers_each_time(loaded_of: LoadedOf) -> None:
    """Also what its architecture draws at random by itself: Qwen3.5's decays."""
    one, other = (stand_in(loaded_of("qwen3_5").model).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("family", "notes"),
    [
        ("gemma3", {"two_way": TwoWay.NONE}),
        ("gemma3", {"two_way": TwoWay.PROMPT}),
        ("gemma3", {"two_way_in_windows_only": True}),
        ("paligemma", {"two_way": TwoWay.NONE}),
        ("llava", {"two_way": TwoWay.IMAGES}),
        ("qwen3_vl", {"text_arguments": lambda step: {}}),
    ],
)
def test_wrong_notes_are_found_out(family: str, notes: dict[str, Any], loaded_of: LoadedOf, tmp_path: Path) -> None:
    loaded = loaded_of(family)
    proof = prove(replace(loaded, notes=replace(loaded.notes, **notes)), cache_dir=tmp_path)
    assert proof.error > MIN_CONTRAST * MAX_ERROR
    assert "differ from transformers" in str(proof.reason)


@pytest.mark.parametrize("window", [8, 4096])
def test_windows_are_of_use_in_short_prompts(window: int, loaded_of: LoadedOf) -> None:
    config = copy.deepcopy(loaded_of("gemma3").config)
    config.get_text_config().sliding_window = window
    small = stand_in(type(loaded_of("gemma3").model)(config))
    assert small.config.get_text_config().sliding_window == WINDOW
    assert {layer.self_attn.sliding_window for layer in small.model.language_model.layers} == {None, WINDOW}


BIG_TEXT = {
    "gemma3": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2,
        "sliding_window": 1024,
        "vocab_size": 262208,
    },
    "qwen2_5_vl": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "layer_types": ["full_attention"] * 28,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        "vocab_size": 152064,
    },
    "qwen3_vl_moe": {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "mlp_only_layers": [],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
        "vocab_size": 151936,
    },
    "qwen3_5": {
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
        "vocab_size": 248320,
    },
}
"""Text models of published size; the towers stay tiny."""


@pytest.mark.parametrize("family", BIG_TEXT)
def test_big_models_are_proven_on_small_stand_ins(family: str, loaded_of: LoadedOf, tmp_path: Path) -> None:
    tiny = loaded_of(family)
    config = copy.deepcopy(tiny.config)
    for name, value in BIG_TEXT[family].items():
        assert hasattr(config.text_config, name)
        setattr(config.text_config, name, value)
    if hasattr(config.vision_config, "out_hidden_size"):
        config.vision_config.out_hidden_size = config.text_config.hidden_size
    with torch.device("meta"):
        big = type(tiny.model)(config)
    loaded = prepare_model(big, tiny.processing.processor, source=family)
    assert sum(p.numel() for p in stand_in(big).parameters() if p.is_contiguous()) < 30_000_000
    proof = prove(loaded, cache_dir=tmp_path)
    assert proof.reason is None
    assert proof.error <= MAX_ERROR / 5


def test_a_result_is_kept_for_the_next_start(
    loaded_of: LoadedOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = loaded_of("llava")
    first = prove(loaded, cache_dir=tmp_path)
    monkeypatch.setattr(proving, "_prove", lambda _: pytest.fail("proven again"))
    assert prove(loaded, cache_dir=tmp_path) == first
    changed = replace(loaded, notes=replace(loaded.notes, two_way=TwoWay.IMAGES))
    with pytest.raises(pytest.fail.Exception, match="proven again"):
        prove(changed, cache_dir=tmp_path)


def test_a_family_of_the_tests_is_not_proven_again(loaded_of: LoadedOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "prove", lambda _: pytest.fail("proven again"))
    assert settled(loaded_of("gemma3")) is loaded_of("gemma3")


def test_code_that_fails_is_no_proof(
    loaded_of: LoadedOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("no such width")

    monkeypatch.setattr(proving, "stand_in", broken)
    loaded = replace(loaded_of("llava"), is_proven=False)
    assert "no such width" in str(prove(loaded, cache_dir=tmp_path).reason)


def test_what_is_not_proven_is_served_by_transformers(
    gemma3: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With pictures, adapters and all: the same answers, one after the other."""
    monkeypatch.setattr(proving, "prove", lambda _: Proof("this is a test"))
    loaded = replace(load_model(gemma3.checkpoint, EngineConfig()), is_proven=False)
    with LLM.from_loaded(loaded, gemma3.adapters) as llm:
        assert llm.loaded.host_reason == "this is a test"
        assert "as this is a test" in caplog.text
        gemma3.check(
            llm, [*mixed(["two", "text"], ["base", "connector", "all"]), Case("picture", "tower")], num_tokens=3
        )
