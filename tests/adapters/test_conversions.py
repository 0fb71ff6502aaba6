"""Adapters whose initialisation changes the base weights: converted as the refusal says, they are PEFT's model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from polylens.adapters import load_adapter, merge_into
from polylens.errors import AdapterUnsupportedError
from tests.adapters.test_peft_configs import BASE, LAYERS, randomise


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trained(init: str, folder: Path) -> PeftModel:
    """Trained from this initialisation; the adapter as it was before training is left in `folder`."""
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "fc1"], init_lora_weights=init)
    adapted = get_peft_model(copy.deepcopy(BASE), config)
    adapted.peft_config["default"].init_lora_weights = True  # as PEFT's guide says, else it would be made anew
    adapted.save_pretrained(str(folder))
    adapted.peft_config["default"].init_lora_weights = init
    randomise(adapted, 0)
    return adapted


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_a_converted_adapter_is_what_was_trained(init: str, tmp_path: Path) -> None:
    adapted = trained(init, tmp_path / "before")
    adapted.save_pretrained(str(tmp_path / "plain"), path_initial_model_for_weight_conversion=str(tmp_path / "before"))
    adapter, _ = load_adapter(tmp_path / "plain", LAYERS, name="a", dtype=torch.float32, device="cpu")
    state = dict(BASE.state_dict())
    merge_into(state, adapter.deltas.values(), LAYERS)
    expected = adapted.merge_and_unload().state_dict()
    changed = 0
    for name in state:
        torch.testing.assert_close(state[name], expected[name], atol=1e-5, rtol=1e-5, msg=name)
        changed += not torch.allclose(state[name], BASE.state_dict()[name])
    assert changed == 6


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_as_it_is_it_is_refused_with_the_way_to_convert_it(init: str, tmp_path: Path) -> None:
    trained(init, tmp_path / "before").save_pretrained(str(tmp_path / "raw"))
    with pytest.raises(AdapterUnsupportedError, match="path_initial_model_for_weight_conversion") as caught:
        load_adapter(tmp_path / "raw", LAYERS, name="a", dtype=torch.float32, device="cpu")
    assert caught.value.option == "init_lora_weights"


@pytest.mark.parametrize("init", ["eva", "gaussian", "orthogonal", True, False])
def test_an_initialisation_that_leaves_the_base_alone(init: str | bool, tmp_path: Path) -> None:
    options = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": init}
    adapted = get_peft_model(copy.deepcopy(BASE), LoraConfig(**options))
    randomise(adapted, 0)
    adapted.save_pretrained(str(tmp_path))
    adapter, _ = load_adapter(tmp_path, LAYERS, name="a", dtype=torch.float32, device="cpu")
    state = dict(BASE.state_dict())
    merge_into(state, adapter.deltas.values(), LAYERS)
    expected = adapted.merge_and_unload().state_dict()
    for name in state:
        torch.testing.assert_close(state[name], expected[name], atol=1e-5, rtol=1e-5, msg=name)
