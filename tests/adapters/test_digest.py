"""Digests follow content and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from polylens.adapters.load import load_adapter
from polylens.core import Digests
from tests.adapters.fake_layers import CONNECTOR, LANGUAGE, TOWER, config, factors, fake_layers, write_adapter


def digests(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype = torch.float32,
    binary: bool = False,
    **options: Any,
) -> Digests:
    folder = folder / str(len(list(folder.iterdir())))
    write_adapter(folder, tensors, config(**options), binary=binary)
    return load_adapter(folder, fake_layers(), name="a", dtype=dtype, device="cpu")[0].digests


def test_equal_content_equal_digest(tmp_path: Path) -> None:
    tensors = {**factors(TOWER), **factors(LANGUAGE)}
    base = digests(tmp_path, tensors)
    assert digests(tmp_path, dict(reversed(tensors.items()))) == base
    assert digests(tmp_path, tensors, binary=True) == base
    assert digests(tmp_path, tensors, torch.bfloat16) == base
    assert digests(tmp_path, {**factors("visual.blocks.0.attn.qkv"), **factors(LANGUAGE)}) == base
    assert digests(tmp_path, tensors, alpha_pattern={"unused": 1}, lora_dropout=0.5) == base


def test_dtype_of_the_file_does_not_count_its_values_do(tmp_path: Path) -> None:
    half = factors(TOWER, dtype=torch.float16)
    assert digests(tmp_path, half) == digests(tmp_path, {name: tensor.float() for name, tensor in half.items()})
    assert digests(tmp_path, half) != digests(tmp_path, factors(TOWER))


def test_components_without_deltas(tmp_path: Path) -> None:
    language = digests(tmp_path, factors(LANGUAGE))
    assert (language.vision_tower, language.connector, language.vision) == ("", "", "")
    assert language.language_model
    assert language.whole
    tower = digests(tmp_path, factors(TOWER))
    assert (tower.connector, tower.language_model) == ("", "")
    assert tower.vision_tower
    assert tower.vision


def test_every_difference_counts_where_it_is(tmp_path: Path) -> None:
    tensors = {**factors(TOWER), **factors(CONNECTOR), **factors(LANGUAGE)}
    base = digests(tmp_path, tensors)
    changed = dict(tensors)
    key = f"base_model.model.{LANGUAGE}.lora_B.weight"
    changed[key] = tensors[key].clone()
    changed[key][0, 0] = torch.nextafter(changed[key][0, 0], torch.tensor(9.0))
    other = digests(tmp_path, changed)
    assert other.vision == base.vision
    assert other.language_model != base.language_model
    assert other.whole != base.whole
    scaled = digests(tmp_path, tensors, alpha_pattern={"qkv": 5})
    assert scaled.vision_tower != base.vision_tower
    assert scaled.connector == base.connector
    assert scaled.vision != base.vision
    assert scaled.language_model == base.language_model


def test_layer_names_count(tmp_path: Path) -> None:
    one = digests(tmp_path, factors("model.layers.0.self_attn.q_proj"))
    other = digests(tmp_path, factors("model.layers.1.self_attn.q_proj"))
    assert one.language_model != other.language_model
