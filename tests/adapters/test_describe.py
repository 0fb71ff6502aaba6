"""What `polylens inspect` tells, with a model and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from polylens.adapters.describe import NO_MODEL, AdapterDescription, describe_adapter
from polylens.errors import AdapterFormatError
from tests.adapters.fake_layers import CONNECTOR, LANGUAGE, TOWER, config, factors, fake_layers, write_adapter


def describe(
    folder: Path, tensors: dict[str, torch.Tensor], with_model: bool = True, **options: Any
) -> AdapterDescription:
    write_adapter(folder, tensors, config(**options))
    described = describe_adapter(folder, fake_layers() if with_model else None)
    json.dumps(described.to_json(), allow_nan=False)
    return described


def test_with_a_model(tmp_path: Path) -> None:
    described = describe(tmp_path, {**factors(TOWER), **factors("model.layers.0.self_attn.q_proj")})
    plain = described.to_json()
    assert plain["loads"] is True
    assert plain["model_type"] == "fake_vl"
    assert plain["ranks"] == [2]
    assert plain["dtypes"] == ["float32"]
    assert plain["components"].keys() == {"vision_tower", "language_model"}
    assert plain["components"]["vision_tower"]["scalings"] == (2.0,)
    assert plain["digests"]["connector"] == ""
    assert plain["options"]["alpha"] == 4
    layer = plain["layers"][1]
    assert (layer["module"], layer["layer"]) == ("model.layers.0.self_attn.q_proj", LANGUAGE)
    assert layer["component"] == "language_model"


def test_without_a_model_names_are_not_guessed_at(tmp_path: Path) -> None:
    plain = describe(tmp_path, {**factors(TOWER), **factors(CONNECTOR)}, with_model=False).to_json()
    assert plain["loads"] is None
    assert plain["components"] == plain["digests"] == NO_MODEL
    assert {layer["component"] for layer in plain["layers"]} == {NO_MODEL}
    assert plain["num_tensors"] == 4
    assert plain["num_parameters"] == sum(layer["num_parameters"] for layer in plain["layers"])


def test_everything_wrong_at_once(tmp_path: Path) -> None:
    tensors = {**factors(TOWER), **factors("nowhere"), f"{TOWER}.lora_magnitude_vector": torch.ones(1)}
    described = describe(tmp_path, tensors, layer_replication=[[0, 1]], bias="most")
    assert described.loads is False
    assert [refusal.option for refusal in described.refused] == ["bias", "layer_replication"]
    assert "use_dora is false" in described.problems[0]
    assert "nowhere" in described.problems[1]
    assert described.digests is None
    assert described.components is not None


@pytest.mark.parametrize("with_model", [True, False])
def test_bad_option_values(tmp_path: Path, with_model: bool) -> None:
    described = describe(tmp_path, factors(TOWER), with_model, r=0)
    assert described.loads is False
    assert described.options is None
    assert "r must be" in described.problems[0]
    assert described.to_json()["components"] == (None if with_model else NO_MODEL)


def test_wrong_files_without_a_model(tmp_path: Path) -> None:
    tensors = factors(TOWER)
    tensors.popitem()
    assert describe(tmp_path, tensors, with_model=False).loads is False


def test_weights_beside_the_adapter(tmp_path: Path) -> None:
    (tmp_path / "non_lora_trainables.bin").touch()
    assert describe(tmp_path, factors(TOWER)).refused[0].option == "non_lora_trainables.bin"


def test_nothing_to_describe(tmp_path: Path) -> None:
    with pytest.raises(AdapterFormatError, match="no adapter_config"):
        describe_adapter(tmp_path)


def test_describe_agrees_with_load(tmp_path: Path) -> None:
    from polylens.adapters.load import load_adapter

    described = describe(tmp_path, factors(TOWER))
    adapter, report = load_adapter(tmp_path, fake_layers(), name="a", dtype=torch.float32, device="cpu")
    assert described.digests == adapter.digests
    assert described.components == report.components
