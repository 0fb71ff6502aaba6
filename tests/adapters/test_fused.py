"""Split and fused projections: the same update of the weights, whichever way the file and the model have it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polylens.adapters import load_adapter
from polylens.core import Component, Delta, LayerKind, LayerSpec, ModelLayers
from polylens.errors import AdapterMismatchError
from tests.adapters.fake_layers import config, write_adapter

WIDTH = 6
SIZES = {"q_proj": 8, "k_proj": 4, "v_proj": 4}
HALVES = {"gate_proj": 10, "up_proj": 10}


def layers(sizes: dict[str, int]) -> ModelLayers:
    specs = {
        f"a.{leaf}": LayerSpec(f"a.{leaf}", Component.LANGUAGE_MODEL, LayerKind.LINEAR, WIDTH, size)
        for leaf, size in sizes.items()
    }
    return ModelLayers(specs, lambda path: path, "fake_vl", "Fake", 1)


def tensors(sizes: dict[str, int], rank: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = {}
    for leaf, size in sizes.items():
        made[f"base_model.model.a.{leaf}.lora_A.weight"] = torch.randn(rank, WIDTH, generator=generator)
        made[f"base_model.model.a.{leaf}.lora_B.weight"] = torch.randn(size, rank, generator=generator)
    return made


def updates(folder: Path, file: dict[str, torch.Tensor], model: dict[str, int], **options: object):
    write_adapter(folder, file, config(**options))
    adapter, report = load_adapter(folder, layers(model), name="a", dtype=torch.float32, device="cpu")
    assert report.num_tensors == len(file)
    changed = {}
    for name, delta in adapter.deltas.items():
        assert isinstance(delta, Delta)
        changed[name.removeprefix("a.")] = delta.scaling * delta.b @ delta.a
    return changed


def update(file: dict[str, torch.Tensor], leaf: str, scaling: float = 2.0) -> torch.Tensor:
    key = f"base_model.model.a.{leaf}.lora"
    return scaling * file[f"{key}_B.weight"] @ file[f"{key}_A.weight"]


@pytest.mark.parametrize(("sizes", "fused"), [(SIZES, "qkv"), (SIZES, "qkv_proj"), (HALVES, "gate_up_proj")])
def test_split_in_the_file_fused_in_the_model(tmp_path: Path, sizes: dict[str, int], fused: str) -> None:
    file = tensors(sizes)
    found = updates(tmp_path, file, {fused: sum(sizes.values())}, alpha_pattern={"k_proj": 3})
    scalings = {"k_proj": 1.5}
    torch.testing.assert_close(found[fused], torch.cat([update(file, leaf, scalings.get(leaf, 2.0)) for leaf in sizes]))


@pytest.mark.parametrize("leaf", ["q_proj", "k_proj", "v_proj"])
def test_one_part_of_a_fused_layer(tmp_path: Path, leaf: str) -> None:
    file = tensors({leaf: SIZES[leaf]})
    expected = torch.cat([update(file, one) if one == leaf else torch.zeros(SIZES[one], WIDTH) for one in SIZES])
    torch.testing.assert_close(updates(tmp_path, file, {"qkv": 16})["qkv"], expected)


@pytest.mark.parametrize(("sizes", "fused"), [(SIZES, "qkv"), (HALVES, "gate_up_proj")])
def test_fused_in_the_file_split_in_the_model(tmp_path: Path, sizes: dict[str, int], fused: str) -> None:
    file = tensors({fused: sum(sizes.values())})
    found = updates(tmp_path, file, sizes)
    torch.testing.assert_close(torch.cat([found[leaf] for leaf in sizes]), update(file, fused))


def test_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(AdapterMismatchError, match="parts have q_proj 8, k_proj 4, v_proj 4 outputs"):
        updates(tmp_path / "size", tensors(SIZES), {"qkv": 18})
    with pytest.raises(AdapterMismatchError, match="rank 2 in the file, 5 in adapter_config"):
        updates(tmp_path / "rank", tensors(SIZES), {"qkv": 16}, rank_pattern={"v_proj": 5})
    with pytest.raises(AdapterMismatchError, match=r"no layer a\.qkv"):
        updates(tmp_path / "split", tensors({"qkv": 18}), SIZES)
