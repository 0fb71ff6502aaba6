"""Parameters and rows of the model itself in an adapter's file: `modules_to_save`, biases, tied heads, tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from polylens.core import Component, LayerKind, LayerSpec, ModelLayers, ScaledDelta, TokenRows
from polylens.errors import AdapterMismatchError, AdapterUnsupportedError
from tests.adapters.fake_layers import (
    EMBEDDING,
    IN,
    LANGUAGE,
    NORM,
    OUT,
    POSITIONS,
    TOWER,
    VOCABULARY,
    factors,
    fake_layers,
    load,
    mismatch,
)


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
    layers, tied = fake_layers(), tied_layers()
    shared = tied.parameters["lm_head.weight"]
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
    mismatch(tmp_path / "other", {**own, **other}, "lm_head differs from", layers=layers, **options)
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
    mismatch(tmp_path / "c", short, "has shape (6, 6), the model's layer (7, 6)", layers=layers)
    unknown = {"base_model.model.visual.embeddings.other": torch.ones(IN)}
    mismatch(tmp_path / "d", unknown, "no such parameter", layers=layers)
    with pytest.raises(AdapterUnsupportedError, match="a parameter of the whole tower"):
        load(tmp_path / "e", factors(POSITIONS), layers)
