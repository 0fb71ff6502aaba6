"""The base model's parameters, read from its files under the loaded model's names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from polylens.errors import ModelLoadError
from polylens.hosts.vllm.checkpoint import Checkpoint, StoredParameters


def rename(path: str) -> str:
    return f"model.{path}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"one.weight": torch.arange(12.0).view(4, 3), "one.bias": torch.ones(4)}, tmp_path / "1.safetensors")
    save_file({"bare": torch.ones(2, 2)}, tmp_path / "2.safetensors")
    return tmp_path


def test_tensors_are_found_under_the_models_names(folder: Path):
    checkpoint = Checkpoint(str(folder), rename)
    assert checkpoint.stored_name("model.one.weight") == "one.weight"
    assert torch.equal(checkpoint.read("model.one.bias"), torch.ones(4))
    assert torch.equal(checkpoint.read("model.bare"), torch.ones(2, 2))
    assert checkpoint.read("model.two.weight") is None


def test_rows_are_read_alone(folder: Path):
    rows = Checkpoint(str(folder), rename).rows("model.one.weight", [slice(0, 1), slice(3, 4)])
    assert rows.tolist() == [[0, 1, 2], [9, 10, 11]]


def test_parts_of_one_parameter_are_not_taken_for_it(folder: Path):
    assert Checkpoint(str(folder), lambda _: "same").stored_name("same.weight") == "one.weight"
    save_file({"other.weight": torch.ones(4, 3)}, folder / "3.safetensors")
    assert Checkpoint(str(folder), lambda _: "same").stored_name("same.weight") is None


def test_a_folder_without_safetensors_is_refused(tmp_path: Path):
    with pytest.raises(ModelLoadError, match="no safetensors"):
        Checkpoint(str(tmp_path), rename)


def test_values_are_read_for_parameters_of_the_same_shape_that_are_not_shared(folder: Path):
    shared = torch.empty(4, 3, device="meta")
    outline = {
        "model.one.weight": torch.empty(4, 3, device="meta"),
        "model.one.bias": torch.empty(5, device="meta"),
        "model.head.weight": shared,
        "model.embed.weight": shared,
    }
    parameters = StoredParameters(outline, Checkpoint(str(folder), rename))
    assert not parameters["model.one.weight"].is_meta
    assert parameters["model.one.bias"].is_meta
    assert parameters["model.head.weight"] is parameters["model.embed.weight"]
    assert "model.none" not in parameters
    assert set(parameters) == set(outline)
