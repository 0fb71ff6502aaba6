"""Mechanism 1: every tensor of a file is used, or nothing is and every reason is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polylens.adapters.fit import fit_adapter
from polylens.adapters.load import load_adapter
from polylens.adapters.options import parse_options
from polylens.core import Component, LayerKind, LayerSpec, ModelLayers
from polylens.errors import AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError
from tests.adapters.fake_layers import (
    CONNECTOR,
    CONVOLUTION,
    EMBEDDING,
    IN,
    LANGUAGE,
    NORM,
    OUT,
    PARAMETER,
    PATCH,
    POSITIONS,
    TOWER,
    VOCABULARY,
    config,
    factors,
    fake_layers,
    load,
    mismatch,
    write_adapter,
)


def test_report(tmp_path: Path) -> None:
    tensors = {**factors(TOWER), **factors(CONNECTOR), **factors(LANGUAGE, rank=4), **factors("lm_head")}
    adapter, report = load(tmp_path, tensors, rank_pattern={"q_proj": 4}, alpha_pattern={"lm_head": 3})
    assert list(adapter.deltas) == [TOWER, CONNECTOR, "lm_head", LANGUAGE]
    language = report.components[Component.LANGUAGE_MODEL]
    assert (language.num_layers, language.num_tensors) == (2, 4)
    assert language.num_parameters == 2 * (IN + OUT) + 4 * (IN + OUT)
    assert language.ranks == (2, 4)
    assert language.scalings == (1.0, 1.5)
    assert report.num_tensors == len(tensors)
    assert report.num_bytes == adapter.num_bytes == 4 * 5 * 2 * (IN + OUT)
    assert adapter.deltas[LANGUAGE].rank == 4
    assert report.to_json()["components"]["vision_tower"]["ranks"] == (2,)


def test_delta_values(tmp_path: Path) -> None:
    tensors = factors(TOWER)
    adapter, _ = load(tmp_path, tensors)
    a, b = tensors.values()
    delta = adapter.deltas[TOWER]
    assert torch.equal(delta.a, a)
    assert torch.equal(delta.b, b)
    assert delta.a.is_contiguous()
    assert delta.b.is_contiguous()
    assert delta.scaling == 2.0


def test_bare_parameter_is_turned(tmp_path: Path) -> None:
    name = "base_model.model.model.projector"
    a, b = torch.randn(2, OUT), torch.randn(IN, 2)
    tensors = {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    options = {"target_parameters": ["projector.input_weight"], "alpha_pattern": {"input_weight": 8}}
    adapter, _ = load(tmp_path, tensors, **options)
    delta = adapter.deltas[PARAMETER]
    assert torch.equal(delta.a, b.T)
    assert torch.equal(delta.b, a.T)
    assert delta.a.is_contiguous()
    assert delta.scaling == 4.0
    with pytest.raises(AdapterUnsupportedError) as caught:
        load(tmp_path, tensors, fan_in_fan_out=True, **options)
    assert caught.value.option == "fan_in_fan_out"


def test_fan_in_fan_out_means_nothing_for_linear_layers(tmp_path: Path) -> None:
    plain, _ = load(tmp_path, factors(TOWER))
    other, _ = load(tmp_path, factors(TOWER), fan_in_fan_out=True)
    assert plain.digests == other.digests


def test_patterns_are_matched_against_the_names_in_the_file(tmp_path: Path) -> None:
    """They were written for the model that was trained, whose names the file has."""
    tensors = factors("model.layers.1.self_attn.q_proj", rank=4)
    pattern = {"^model.layers.1.self_attn.q_proj": 4}
    adapter, report = load(tmp_path, tensors, rank_pattern=pattern, alpha_pattern=dict.fromkeys(pattern, 6))
    assert adapter.deltas["model.language_model.layers.1.self_attn.q_proj"].scaling == 1.5
    assert "rank_pattern" in report.warnings[0]
    assert "alpha_pattern" in report.warnings[1]


def test_overlapping_patterns(tmp_path: Path) -> None:
    """PEFT sorts patterns when it saves, so the order of training is lost: then the first in the file counts."""
    pattern = {"layers.0.self_attn.q_proj": 6, "q_proj": 4}
    tensors = factors(LANGUAGE, rank=4)
    mismatch(tmp_path, tensors, "rank 4 in the file, 6 in", "2 entries of rank_pattern match it", rank_pattern=pattern)
    adapter, report = load(tmp_path, factors(LANGUAGE), alpha_pattern=pattern)
    assert adapter.deltas[LANGUAGE].scaling == 3.0
    assert report.warnings == (f"2 entries of alpha_pattern match {LANGUAGE}; the first in the file counts",)


def test_one_stray_tensor_refuses_all(tmp_path: Path) -> None:
    mismatch(tmp_path, {**factors(TOWER), "base_model.model.x.lora_C.weight": torch.zeros(1)}, "is not a LoRA tensor")


def test_nearest_names(tmp_path: Path) -> None:
    wrong = factors("model.language_model.layers.1.self_attn.g_proj")
    mismatch(
        tmp_path,
        {**factors(TOWER), **wrong},
        "1.self_attn.g_proj",
        "nearest: model.language_model.layers.1.self_attn.q_proj, model.language_model.layers.1.self_attn.v_proj",
        "fake_vl",
    )


def test_layer_out_of_range(tmp_path: Path) -> None:
    mismatch(
        tmp_path,
        {**factors(TOWER), **factors("model.layers.7.self_attn.q_proj")},
        "model.layers.7.self_attn.q_proj: index 7 of model.language_model.layers is out of range (0 to 2)",
    )


def test_another_base_model(tmp_path: Path) -> None:
    tensors = {key: value for i in range(6) for key, value in factors(f"transformer.h.{i}.attn.c_attn").items()}
    error = mismatch(
        tmp_path, tensors, "made for another base model", "'org/other'", base_model_name_or_path="org/other"
    )
    assert len(error.problems) == 6
    assert "and 2 more" in str(error)


def test_wrong_sizes(tmp_path: Path) -> None:
    key = f"base_model.model.{TOWER}.lora"
    tensors = {f"{key}_A.weight": torch.ones(2, IN + 1), f"{key}_B.weight": torch.ones(OUT, 2)}
    mismatch(tmp_path, tensors, f"factors are for {IN + 1} inputs and {OUT} outputs", f"{IN} and {OUT}", TOWER)


@pytest.mark.parametrize(
    ("shape_a", "shape_b", "words"),
    [
        ((2, IN), (OUT, 3), "lora_A has rank 2, lora_B 3"),
        ((3, IN), (OUT, 3), "rank 3 in the file, 2 in adapter_config.json"),
        ((0, IN), (OUT, 0), "rank 0"),
        ((2, 0), (OUT, 2), "empty"),
        ((2,), (OUT, 2), "two dimensions"),
        ((2, IN, 1, 1, 1, 1), (OUT, 2), "two dimensions"),
    ],
)
def test_shapes(tmp_path: Path, shape_a: tuple[int, ...], shape_b: tuple[int, ...], words: str) -> None:
    key = f"base_model.model.{TOWER}.lora"
    mismatch(tmp_path, {f"{key}_A.weight": torch.ones(shape_a), f"{key}_B.weight": torch.ones(shape_b)}, words, TOWER)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("slot", ["A", "B"])
def test_not_finite(tmp_path: Path, value: float, slot: str) -> None:
    tensors = factors(TOWER, dtype=torch.bfloat16)
    tensors[f"base_model.model.{TOWER}.lora_{slot}.weight"][1, 1] = value
    mismatch(tmp_path, tensors, f"{TOWER}: lora_{slot} holds NaN or infinity")


@pytest.mark.parametrize("slot", ["A", "B"])
def test_unpaired(tmp_path: Path, slot: str) -> None:
    tensors = factors(TOWER)
    del tensors[f"base_model.model.{TOWER}.lora_{slot}.weight"]
    mismatch(tmp_path, tensors, f"{TOWER} has no lora_{slot}")


def test_two_names_of_one_layer(tmp_path: Path) -> None:
    tensors = {**factors(LANGUAGE), **factors("model.layers.0.self_attn.q_proj")}
    mismatch(tmp_path, tensors, "are the same layer", LANGUAGE)


def test_two_adapters_in_one_file(tmp_path: Path) -> None:
    tensors = factors(TOWER)
    for slot in ("A", "B"):
        tensors[f"{TOWER}.lora_{slot}.second.weight"] = tensors[f"base_model.model.{TOWER}.lora_{slot}.weight"].clone()
    mismatch(tmp_path, tensors, "more than one adapter name: (no name), second", "lora_A twice")


def test_ambiguous_name(tmp_path: Path) -> None:
    """With a layer `a.b` and a layer `model.a.b`, what `module.a.b` means cannot be told."""
    specs = {name: LayerSpec(name, Component.CONNECTOR, LayerKind.LINEAR, IN, OUT) for name in ("a.b", "model.a.b")}
    ambiguous = ModelLayers(specs, lambda path: path, "fake_vl", "Fake", 3)
    for module in ("a.b", "model.a.b"):
        assert list(load(tmp_path / module, factors(module), ambiguous)[0].deltas) == [module]
    with pytest.raises(AdapterMismatchError, match=r"may mean any of a\.b, model\.a\.b"):
        load(tmp_path, factors("base_model.model.a.b"), ambiguous)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        (f"{TOWER}.lora_magnitude_vector.weight", (OUT,), "use_dora is false"),
        (f"{TOWER}.lora_magnitude_vector", (OUT,), "use_dora is false"),
        (f"{TOWER}.lora_B.bias", (OUT,), "lora_bias is false"),
        (f"{TOWER}.lora_B.default.bias", (OUT,), "more than one adapter name"),
        ("model.embed_tokens.lora_embedding_A", (2, 4), "no lora_embedding_B"),
        ("model.embed_tokens.token_adapter.trainable_tokens_delta", (2, IN), "names 0 tokens"),
        ("lm_head.weight", (OUT + 1, IN), f"for {OUT + 1} tokens, the model has {OUT}"),
        ("model.embed_tokens.weight", (VOCABULARY + 2, IN), f"for {VOCABULARY + 2} tokens, the model has {VOCABULARY}"),
        ("lm_head.bias", (OUT,), "has no bias"),
        (f"{TOWER}.base_layer.bias", (OUT + 1,), "has shape"),
        (f"{TOWER}.original_module.weight", (OUT, IN), "the module is not replaced"),
        (f"{PARAMETER}_2", (IN, OUT), "has no such parameter"),
    ],
)
def test_tensors_of_other_options(tmp_path: Path, name: str, shape: tuple[int, ...], words: str) -> None:
    """What lies beside the factors must be what the config says, and fit."""
    mismatch(tmp_path, {**factors(TOWER), f"base_model.model.{name}": torch.ones(shape)}, words)


def test_modules_that_take_no_delta(tmp_path: Path) -> None:
    with pytest.raises(AdapterUnsupportedError, match="is a norm"):
        load(tmp_path, factors(NORM))
    with pytest.raises(AdapterUnsupportedError, match="is a Embedding"):
        load(tmp_path, {f"{POSITIONS}.weight": torch.ones(4, IN)})
    key = f"base_model.model.{TOWER}.lora"
    convolution = {f"{key}_A.weight": torch.ones(2, 3, 2, 4, 4), f"{key}_B.weight": torch.ones(OUT, 2, 1, 1, 1)}
    mismatch(tmp_path, convolution, "factors of a convolution")
    mismatch(tmp_path, factors(EMBEDDING), "factors of no embedding")


def test_factors_of_a_patch_embedding(tmp_path: Path) -> None:
    key = f"base_model.model.{CONVOLUTION}.lora"
    a, b = torch.randn(2, *PATCH), torch.randn(OUT, 2, 1, 1, 1)
    adapter, _ = load(tmp_path / "a", {f"{key}_A.weight": a, f"{key}_B.weight": b})
    assert torch.equal(adapter.deltas[CONVOLUTION].tensors()["a"], a.flatten(1))
    assert adapter.special
    mismatch(tmp_path / "b", {f"{key}_A.weight": a, f"{key}_B.weight": torch.ones(OUT, 2, 3, 3, 3)}, "no 1 x 1")


def test_too_large_for_half_precision(tmp_path: Path) -> None:
    tensors = {name: tensor * 1e6 for name, tensor in factors(TOWER).items()}
    write_adapter(tmp_path, tensors)
    with pytest.raises(AdapterMismatchError, match="too large for"):
        load_adapter(tmp_path, fake_layers(), name="a", dtype=torch.float16, device="cpu")


@pytest.mark.parametrize("name", ["", " a", "a\n", "a" * 201, "\x1b"])
def test_adapter_names(tmp_path: Path, name: str) -> None:
    write_adapter(tmp_path, factors(TOWER))
    with pytest.raises(AdapterFormatError, match="adapter name"):
        load_adapter(tmp_path, fake_layers(), name=name, dtype=torch.float32, device="cpu")


MODULES = st.one_of(
    st.sampled_from([TOWER, CONNECTOR, LANGUAGE, NORM, CONVOLUTION, "model.layers.9.self_attn.q_proj", "a", ""]),
    st.text("model.visual0attnqkv", max_size=30),
)
SUFFIXES = st.sampled_from(
    [
        ".lora_A.weight",
        ".lora_B.weight",
        ".lora_A.x.weight",
        ".lora_B.x.weight",
        ".weight",
        ".lora_A",
        "",
        ".lora_B.bias",
    ]
)
SHAPES = st.one_of(st.just((2, IN)), st.just((OUT, 2)), st.lists(st.integers(0, 3), max_size=5).map(tuple))


@given(st.dictionaries(st.tuples(MODULES, SUFFIXES).map("".join), SHAPES, max_size=6))
def test_nothing_is_left_over(shapes: dict[str, tuple[int, ...]]) -> None:
    """Whatever the names and shapes: everything fits, or something is told; never silence about a tensor."""
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    fit = fit_adapter(tensors, parse_options(config()), fake_layers())
    if not fit.problems and not fit.unsupported:
        assert sum(part.num_tensors for part in fit.layers) + fit.num_copies == len(tensors)
