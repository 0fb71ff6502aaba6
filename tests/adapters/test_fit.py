"""Mechanism 1: every tensor of a file is used, or nothing is and every reason is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polylens.adapters.fit import fit_adapter
from polylens.adapters.load import load_adapter
from polylens.adapters.options import parse_options
from polylens.core import Component, LayerKind, LayerSpec, ModelLayers, ScaledDelta, TokenRows
from polylens.errors import AdapterError, AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError
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
    write_adapter,
)


def load(folder: Path, tensors: dict[str, torch.Tensor], layers: ModelLayers | None = None, **options: Any):
    write_adapter(folder, tensors, config(**options))
    dtype = options.pop("dtype", torch.float32)
    return load_adapter(folder, layers or fake_layers(), name="a", dtype=dtype, device="cpu")


def mismatch(folder: Path, tensors: dict[str, torch.Tensor], *words: str, **options: Any) -> AdapterMismatchError:
    with pytest.raises(AdapterMismatchError) as caught:
        load(folder, tensors, **options)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


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


def test_whole_parameters_and_copies(tmp_path: Path) -> None:
    """New weights and biases are applied; those that are the base model's own change nothing, digest included."""
    layers = fake_layers()
    own = {f"base_model.model.{name}": layers.parameters[name].clone() for name in ("lm_head.weight", f"{TOWER}.bias")}
    plain, _ = load(tmp_path / "plain", factors(TOWER))
    adapter, report = load(tmp_path / "copies", {**factors(TOWER), **own})
    assert (adapter.digests, list(adapter.deltas), report.num_copies) == (plain.digests, [TOWER], 2)
    assert report.num_tensors == 4
    assert not adapter.special
    changed = {name: tensor + 1 for name, tensor in own.items()} | {f"{NORM}.weight": torch.ones(IN)}
    adapter, report = load(tmp_path / "changed", {**factors(TOWER), **changed})
    assert set(adapter.deltas) == {TOWER, "lm_head", NORM}
    assert isinstance(adapter.deltas[TOWER], ScaledDelta)
    assert torch.equal(adapter.deltas["lm_head"].tensors()["weight"], layers.parameters["lm_head.weight"] + 1)
    assert adapter.special
    assert report.num_tensors == 5
    assert report.components[Component.LANGUAGE_MODEL].num_replaced == 1


def test_one_parameter_under_two_names(tmp_path: Path) -> None:
    twice = {"lm_head.weight": torch.ones(OUT, IN), "lm_head.modules_to_save.default.weight": torch.zeros(OUT, IN)}
    mismatch(tmp_path / "a", twice, "is in the file twice")
    repeated = {name: torch.ones(IN) for name in (f"{NORM}.bias", f"{NORM}.modules_to_save.bias")}
    repeated[f"{NORM}.original_module.bias"] = torch.zeros(IN)  # PEFT writes all three with bias="all"
    report = load(tmp_path / "c", repeated)[1]
    assert (report.num_tensors, report.num_copies) == (3, 2)
    renamed = {"visual.norm.bias": torch.ones(IN), "model.visual.norm.bias": torch.ones(IN)}
    mismatch(tmp_path / "b", renamed, "under another name as well")


def test_the_weight_of_a_tied_head(tmp_path: Path) -> None:
    """A copy that is none would change head and embedding: taken only where it was trained as one of them."""
    layers = fake_layers()
    shared = torch.randn(VOCABULARY, IN)
    head = LayerSpec("lm_head", Component.LANGUAGE_MODEL, LayerKind.LINEAR, IN, VOCABULARY)
    tied = dataclasses.replace(
        layers,
        specs={**layers.specs, "lm_head": head},
        parameters={**layers.parameters, "lm_head.weight": shared, f"{EMBEDDING}.weight": shared},
    )
    for name in ("lm_head", "model.embed_tokens"):
        rounded = {f"{name}.weight": shared.half(), **factors(TOWER)}
        assert load(tmp_path / f"rounded {name}", rounded, tied)[1].num_copies == 1
        other = {f"{name}.weight": shared + 1}
        with pytest.raises(AdapterMismatchError, match="cannot be told"):
            load(tmp_path / f"other {name}", other, tied)
        saved, _ = load(tmp_path / f"saved {name}", other, tied, modules_to_save=[name.rpartition(".")[2]])
        assert list(saved.deltas) == ["lm_head" if name == "lm_head" else EMBEDDING]
        assert load(tmp_path / f"untied {name}", {f"{EMBEDDING}.weight": shared + 1}, layers)[1].num_tensors == 1
    outlined = dataclasses.replace(tied, parameters=dict.fromkeys(tied.parameters, shared.to("meta")))
    _, report = load(tmp_path / "outline", {"lm_head.weight": shared, **factors(TOWER)}, outlined)
    assert report.num_copies == 1
    assert "is not seen without the model's weights" in report.warnings[0]


def test_trained_tokens(tmp_path: Path) -> None:
    key = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    rows = torch.randn(3, IN)
    adapter, report = load(tmp_path / "a", {key: rows}, trainable_token_indices=[7, 2, 9])
    change = adapter.deltas[EMBEDDING]
    assert isinstance(change, TokenRows)
    assert change.token_ids == (2, 7, 9)
    assert torch.equal(change.rows_nd, rows[[1, 0, 2]])
    assert report.num_tensors == 1
    mismatch(tmp_path / "b", {key: rows}, "names 2 tokens", trainable_token_indices=[7, 2])
    mismatch(tmp_path / "c", {key: rows}, "has 11 of width", trainable_token_indices=[7, 2, VOCABULARY])


def test_modules_that_take_no_delta(tmp_path: Path) -> None:
    with pytest.raises(AdapterUnsupportedError, match="is a norm"):
        load(tmp_path, factors(NORM))
    with pytest.raises(AdapterUnsupportedError, match="is a Embedding"):
        load(tmp_path, {f"{POSITIONS}.weight": torch.ones(4, IN)})
    key = f"base_model.model.{TOWER}.lora"
    convolution = {f"{key}_A.weight": torch.ones(2, 3, 2, 4, 4), f"{key}_B.weight": torch.ones(OUT, 2, 1, 1, 1)}
    mismatch(tmp_path, convolution, "factors of a convolution")
    mismatch(tmp_path, factors(EMBEDDING), "factors of no embedding")


def test_the_models_own_values_of_what_takes_no_delta_change_nothing(tmp_path: Path) -> None:
    """A module saved as a whole may hold parameters that were never trained."""
    own, name = torch.randn(5, IN), f"base_model.model.{POSITIONS}.weight"
    layers = fake_layers()
    layers = dataclasses.replace(layers, parameters={**layers.parameters, f"{POSITIONS}.weight": own})
    _, report = load(tmp_path / "own", {**factors(LANGUAGE), name: own}, layers)
    assert (report.num_copies, report.num_tensors) == (1, 3)
    with pytest.raises(AdapterUnsupportedError, match="takes no delta"):
        load(tmp_path / "other", {**factors(LANGUAGE), name: own + 1}, layers)


HEAD_WEIGHT, EMBEDDING_WEIGHT = "base_model.model.lm_head.weight", f"base_model.model.{EMBEDDING}.weight"


def vocabulary(num_tokens: int) -> dict[str, torch.Tensor]:
    return {HEAD_WEIGHT: torch.randn(num_tokens, IN), EMBEDDING_WEIGHT: torch.randn(num_tokens, IN)}


def with_head_of_all_tokens() -> ModelLayers:
    """The made-up model with a head that has a row for every row of its embedding."""
    layers = fake_layers()
    specs = {**layers.specs, "lm_head": dataclasses.replace(layers.specs["lm_head"], out_features=VOCABULARY)}
    parameters = {**layers.parameters, "lm_head.weight": torch.randn(VOCABULARY, IN)}
    return dataclasses.replace(layers, specs=specs, parameters=parameters, more_tokens=True)


def test_tokens_beyond_the_vocabulary(tmp_path: Path) -> None:
    layers = with_head_of_all_tokens()
    adapter, _ = load(tmp_path / "more", vocabulary(VOCABULARY + 3), layers)
    assert adapter.num_more_tokens == 3
    assert load(tmp_path / "same", vocabulary(VOCABULARY), layers)[0].num_more_tokens == 0
    closed = dataclasses.replace(layers, more_tokens=False)
    mismatch(tmp_path / "closed", vocabulary(VOCABULARY + 3), "14 tokens", "has 11", layers=closed)
    mismatch(tmp_path / "fewer", vocabulary(VOCABULARY - 1), "10 tokens", "has 11", layers=layers)
    wider = {name: torch.randn(VOCABULARY + 3, IN + 1) for name in vocabulary(1)}
    mismatch(tmp_path / "wider", wider, "has shape (14, 7)", layers=layers)


@pytest.mark.parametrize("missing", [HEAD_WEIGHT, EMBEDDING_WEIGHT])
def test_tokens_of_the_embedding_or_of_the_head_alone(missing: str, tmp_path: Path) -> None:
    tensors = vocabulary(VOCABULARY + 3)
    del tensors[missing]
    mismatch(tmp_path / "half", tensors, "for 11", "for 14", layers=with_head_of_all_tokens())
    tensors[missing] = torch.randn(VOCABULARY + 2, IN)
    mismatch(tmp_path / "two", tensors, "for 13", "for 14", layers=with_head_of_all_tokens())


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


def test_warnings(tmp_path: Path) -> None:
    tensors = factors(TOWER)
    tensors[f"base_model.model.{TOWER}.lora_B.weight"].zero_()
    _, report = load(tmp_path, tensors, target_modules=["other"])
    assert "does not name 1 layers" in report.warnings[0]
    assert "a delta of zero" in report.warnings[1]
    assert load(tmp_path, factors(TOWER), target_modules=r".*\.attn\.qkv")[1].warnings == ()
    assert load(tmp_path, factors(TOWER), target_modules="all-linear")[1].warnings == ()
    assert load(tmp_path, factors(TOWER), target_modules="(a+)+b")[1].warnings == ()


@pytest.mark.parametrize(
    ("trained_on", "warned"),
    [("org/base-7b", False), ("/data/Base-7B/", False), (None, False), ("org/base-7b-instruct", True)],
)
def test_another_base_model_is_a_warning_where_all_fits(tmp_path: Path, trained_on: str | None, warned: bool) -> None:
    layers = dataclasses.replace(fake_layers(), source="other/base-7b")
    _, report = load(tmp_path, factors(TOWER), layers, base_model_name_or_path=trained_on)
    assert bool(report.warnings) == warned
    assert not warned or f"was trained on {trained_on}" in report.warnings[0]


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


def test_errors_are_adapter_errors() -> None:
    assert issubclass(AdapterMismatchError, AdapterError)


def test_what_the_config_says_was_trained_must_be_there(tmp_path: Path) -> None:
    mismatch(tmp_path, factors(LANGUAGE), "names merger, of which the file has no tensor", modules_to_save=["merger"])
    mismatch(tmp_path, factors(LANGUAGE), "names lm_head, of which", modules_to_save=["lm_head"])
    mismatch(tmp_path, factors(LANGUAGE), "names pos_embed, of which", modules_to_save=["pos_embed"])
    mismatch(tmp_path, factors(LANGUAGE), "the file has no rows of them", trainable_token_indices=[1, 2])
    for bias in ("all", "lora_only"):
        mismatch(tmp_path, factors(TOWER), f"the file has no bias of {TOWER}", bias=bias)
        load(tmp_path, {**factors(TOWER), f"{TOWER}.bias": torch.ones(OUT)}, bias=bias)
        load(tmp_path, factors(LANGUAGE), bias=bias)  # has none


def test_a_module_to_save_that_no_model_has(tmp_path: Path) -> None:
    """PEFT passes over such a name (trainers set `score` for every kind of task)."""
    _, report = load(tmp_path, factors(LANGUAGE), modules_to_save=["score"])
    assert report.warnings == ("modules_to_save names score, which neither model nor file have",)


@pytest.mark.parametrize("saved", [False, True])
def test_a_head_tied_to_the_embedding_goes_with_it(saved: bool, tmp_path: Path) -> None:
    """`ensure_weight_tying`: PEFT writes the head's tensors too; without them they are made, others are refused."""
    layers = tied_layers()
    key = f"base_model.model.{EMBEDDING}"
    a, b = torch.randn(2, VOCABULARY), torch.randn(IN, 2)
    if saved:
        own = {f"{key}.weight": b @ a}
        head = {"lm_head.weight": (b @ a).clone()}
    else:
        own = {f"{key}.lora_embedding_A": a, f"{key}.lora_embedding_B": b}
        head = {"lm_head.lora_A.weight": b.T.contiguous(), "lm_head.lora_B.weight": a.T.contiguous()}
    own = {name: tensor.T.contiguous() if saved else tensor for name, tensor in own.items()}
    head = {name: tensor.T.contiguous() if saved else tensor for name, tensor in head.items()}
    options = {"ensure_weight_tying": True, "modules_to_save": ["embed_tokens"] if saved else None}
    with_head, report = load(tmp_path / "both", {**own, **head}, layers, **options)
    made, _ = load(tmp_path / "one", own, layers, **options)
    assert made.deltas.keys() == {EMBEDDING, "lm_head"}
    assert made.digests == with_head.digests
    assert report.num_tensors == len(own) + len(head)
    for name, tensor in made.deltas["lm_head"].tensors().items():
        assert torch.equal(tensor, with_head.deltas["lm_head"].tensors()[name])
    other = {name: tensor + 1 for name, tensor in head.items()}
    mismatch_on(layers, tmp_path / "other", {**own, **other}, "lm_head differs from", **options)
    apart, _ = load(tmp_path / "apart", own, layers, **options | {"ensure_weight_tying": False})
    assert apart.deltas.keys() == {EMBEDDING}


def tied_layers() -> ModelLayers:
    layers = fake_layers()
    head = LayerSpec("lm_head", Component.LANGUAGE_MODEL, LayerKind.LINEAR, IN, VOCABULARY)
    weight = layers.parameters[f"{EMBEDDING}.weight"]
    return dataclasses.replace(
        layers,
        specs={**layers.specs, "lm_head": head},
        parameters={**layers.parameters, "lm_head.weight": weight},
    )


def mismatch_on(
    layers: ModelLayers, folder: Path, tensors: dict[str, torch.Tensor], words: str, **options: Any
) -> None:
    with pytest.raises(AdapterMismatchError, match=words):
        load(folder, tensors, layers, **options)


def test_parameters_of_a_tower_that_all_items_share(tmp_path: Path) -> None:
    layers = fake_layers()
    names = {f"{POSITIONS}.weight": (7, IN), "model.visual.embeddings.class_embedding": (IN,)}
    specs = {name: LayerSpec(name, Component.VISION_TOWER, LayerKind.SHARED, 7, IN) for name in names}
    own = {name: torch.zeros(shape) for name, shape in names.items()}
    layers = dataclasses.replace(
        layers, specs=layers.specs | specs, parameters={**layers.parameters, **own}, other_modules={}
    )
    tensors = {f"base_model.model.{name}": torch.ones(shape) for name, shape in names.items()}
    adapter, _ = load(tmp_path / "a", tensors, layers, modules_to_save=["visual"])
    assert adapter.deltas.keys() == names.keys()
    assert adapter.undivided
    assert not load(tmp_path / "b", factors(TOWER), layers)[0].undivided
    short = {f"base_model.model.{POSITIONS}.weight": torch.ones(6, IN)}
    mismatch_on(layers, tmp_path / "c", short, r"has shape \(6, 6\), the model's layer \(7, 6\)")
    unknown = {"base_model.model.visual.embeddings.other": torch.ones(IN)}
    mismatch_on(layers, tmp_path / "d", unknown, "no such parameter")
    with pytest.raises(AdapterUnsupportedError, match="a parameter of the whole tower"):
        load(tmp_path / "e", factors(POSITIONS), layers)
