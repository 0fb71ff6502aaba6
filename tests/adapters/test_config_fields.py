"""Every field of PEFT's own configs: applied as PEFT applies it, of no effect here, or refused by its name.

A field that a newer PEFT adds fails `test_every_field_is_known`: someone must say which of the three it is. Until then
the loader refuses it wherever it is set (`test_options.py`).
"""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftModel, get_peft_model

from polylens.adapters import load_adapter, merge_into
from polylens.errors import AdapterUnsupportedError
from tests.adapters.test_peft_configs import BASE, LAYERS, randomise

APPLIED: dict[str, dict[str, Any]] = {
    "r": {"r": 5},
    "lora_alpha": {"lora_alpha": 3},
    "rank_pattern": {"rank_pattern": {"fc1": 4}},
    "alpha_pattern": {"alpha_pattern": {r"layers\.1\.q_proj": 5}},
    "use_rslora": {"use_rslora": True},
    "target_modules": {"target_modules": r"layers\.[02]\..*_proj"},
    "exclude_modules": {"exclude_modules": ["layers.1.q_proj"]},
    "layers_to_transform": {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
    "layers_pattern": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "target_parameters": {"target_parameters": ["lm_head.weight"]},
    "bias": {"bias": "all"},
    "lora_bias": {"lora_bias": True},
    "use_dora": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["norm"]},
    "trainable_token_indices": {"trainable_token_indices": [2, 4]},
    "init_lora_weights": {"init_lora_weights": "mica"},
    "fan_in_fan_out": {"fan_in_fan_out": True},
    "ensure_weight_tying": {"ensure_weight_tying": True, "modules_to_save": ["norm"]},
    "peft_type": {"peft_type": "LORA"},
}
"""Field -> options that give it a value of effect (`fan_in_fan_out` and `ensure_weight_tying`: none on this model)."""

WITHOUT_EFFECT: dict[str, Any] = {
    "auto_mapping": {"base_model_class": "Toy", "parent_library": "toy"},
    "base_model_name_or_path": "somewhere/toy",
    "corda_config": {"corda_method": "kpm"},
    "eva_config": {"rho": 2.0},
    "inference_mode": True,
    "loftq_config": {"loftq_bits": 4},
    "lora_dropout": 0.5,
    "lora_ga_config": {"direction": "ArBr"},
    "megatron_core": "megatron.core",
    "peft_version": "99.0",
    "qalora_group_size": 32,
    "revision": "main",
    "runtime_config": {"ephemeral_gpu_offload": True},
    "task_type": "CAUSAL_LM",
}
"""Field -> a value that the file may hold, which says how the adapter was trained or is kept."""

REFUSED: dict[str, Any] = {
    "alora_invocation_tokens": [1, 2],
    "arrow_config": {"top_k": 3},
    "kasa_config": {"beta": 0.1},
    "layer_replication": [[0, 2], [1, 3]],
    "megatron_config": {"hidden_size": 8},
    "monteclora_config": {"num_samples": 8},
    "use_bdlora": {"nblocks": 2},
    "use_qalora": True,
    "velora_config": {"num_groups": 2},
}
"""Field -> a value under which the layers compute something else than their base and a delta."""

OF_LYCORIS = {
    "alpha",
    "decompose_both",
    "decompose_factor",
    "init_weights",
    "module_dropout",
    "rank_dropout",
    "rank_dropout_scale",
    "use_effective_conv2d",
}
"""Fields that LoHa and LoKr alone have: applied, or about training (`test_lycoris.py`)."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_every_field_is_known() -> None:
    known = [*APPLIED, *WITHOUT_EFFECT, *REFUSED]
    assert len(known) == len(set(known))
    assert {field.name for field in dataclasses.fields(LoraConfig)} == set(known)


@pytest.mark.parametrize("kind", [LoHaConfig, LoKrConfig])
def test_every_field_of_loha_and_lokr_is_known(kind: type) -> None:
    assert {field.name for field in dataclasses.fields(kind)} <= {*APPLIED, *WITHOUT_EFFECT, *OF_LYCORIS}


def saved(folder: Path, **options: Any) -> Path:
    options = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "fc1"], **options}
    adapted = get_peft_model(copy.deepcopy(BASE), LoraConfig(**options))
    randomise(adapted, 0)
    adapted.save_pretrained(str(folder))
    return folder


def merged(folder: Path) -> dict[str, torch.Tensor]:
    adapter, _ = load_adapter(folder, LAYERS, name="a", dtype=torch.float32, device="cpu")
    state = dict(BASE.state_dict())
    merge_into(state, adapter.deltas.values(), LAYERS)
    return state


def edited(folder: Path, **options: Any) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **options}))
    return folder


@pytest.mark.parametrize("field", APPLIED)
def test_applied_as_peft_does(field: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, **APPLIED[field])
    expected = PeftModel.from_pretrained(copy.deepcopy(BASE), str(folder)).merge_and_unload().state_dict()
    ours = merged(folder)
    assert ours.keys() == expected.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], expected[name], atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("field", WITHOUT_EFFECT)
def test_without_effect(field: str, tmp_path: Path) -> None:
    before = merged(saved(tmp_path))
    after = merged(edited(tmp_path, **{field: WITHOUT_EFFECT[field]}))
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("field", REFUSED)
def test_refused_by_its_name(field: str, tmp_path: Path) -> None:
    edited(saved(tmp_path), **{field: REFUSED[field]})
    with pytest.raises(AdapterUnsupportedError, match=field) as caught:
        load_adapter(tmp_path, LAYERS, name="a", dtype=torch.float32, device="cpu")
    assert caught.value.option == field
