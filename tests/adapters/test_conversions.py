"""Initialisations from weights or data. Where they change the base weights, the refusal says how to convert, and the
adapter so converted is PEFT's trained model; where they do not, the adapter loads as it is.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import (
    EvaConfig,
    LoftQConfig,
    LoraConfig,
    LoraGAConfig,
    PeftModel,
    get_peft_model,
    initialize_lora_eva_weights,
)
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.loraga import preprocess_loraga
from torch import nn

from polylens.adapters import load_adapter, merge_into
from polylens.core import ModelLayers
from polylens.errors import AdapterUnsupportedError
from tests.adapters.test_peft_configs import BASE, LAYERS, NUM_BLOCKS, VOCABULARY, Toy, layers_of, randomise

TARGETS = ["q_proj", "fc1"]


class Running(Toy):
    """`Toy`, whose linear layers run: what CorDA, EVA and LoRA-GA look at."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        for block in self.layers:
            x = x + block.mlp["fc2"](torch.tanh(block.mlp["fc1"](block.q_proj(x))))
        return self.lm_head(x)


def running() -> Running:
    model = Running()
    model.load_state_dict(BASE.state_dict())
    return model


def inputs() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (8, 16), generator=torch.Generator().manual_seed(0))


def corda(model: Running, config: LoraConfig) -> None:
    """As `peft.tuners.lora.corda.preprocess_corda`, which needs one package more: the decomposition of W C, C^-1."""
    covariances: dict[nn.Module, torch.Tensor] = {}

    def see(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        x = args[0].detach().flatten(0, -2)
        covariances[module] = x.T @ x + 0.1 * torch.eye(x.shape[-1])

    layers = [layer for name, layer in model.named_modules() if name.rpartition(".")[2] in TARGETS]
    hooks = [layer.register_forward_pre_hook(see) for layer in layers]
    model(inputs())
    for layer, hook in zip(layers, hooks, strict=True):
        hook.remove()
        u, s, vh = torch.linalg.svd(layer.get_parameter("weight").detach() @ covariances[layer], full_matrices=False)
        v = (vh @ torch.linalg.inv(covariances[layer])).T
        layer.eigens = SimpleNamespace(U_WC=u[:, : config.r], S_WC=s[: config.r], V_WC=v[:, : config.r])


def lora_ga(model: Running, config: LoraConfig) -> None:
    preprocess_loraga(model, config, train_step=lambda: model(inputs()).square().mean().backward())


def nothing(model: Running, config: LoraConfig) -> None:
    pass


def loftq(weight: torch.Tensor, *, num_bits: int, reduced_rank: int, num_iter: int) -> tuple[torch.Tensor, ...]:
    """As PEFT's `loftq_init`, which needs bitsandbytes: quantised weights, and the largest part of what they lack."""
    steps = 2**num_bits / 2
    quantised = (weight.detach() * steps).round() / steps
    u, s, vh = torch.linalg.svd(weight.detach() - quantised, full_matrices=False)
    r = reduced_rank
    return quantised, s[:r, None].sqrt() * vh[:r], u[:, :r] * s[:r].sqrt()


CHANGING: dict[str, tuple[Callable[[Running, LoraConfig], None], dict[str, Any]]] = {
    "pissa": (nothing, {}),
    "pissa_niter_4": (nothing, {}),
    "olora": (nothing, {}),
    "corda": (corda, {"corda_config": CordaConfig(corda_method="kpm")}),
    "lora_ga": (lora_ga, {"lora_ga_config": LoraGAConfig()}),
    "loftq": (nothing, {"loftq_config": LoftQConfig(loftq_bits=4)}),
}
"""Initialisations that change the base weights: what is to be done before, and their options."""

CONVERTED = [init for init in CHANGING if init != "loftq"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("peft.tuners.lora.layer.loftq_init", loftq)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trained(init: str, folder: Path) -> PeftModel:
    """Trained from this initialisation; the adapter as it was before training is left in `folder`."""
    prepare, options = CHANGING[init]
    config = LoraConfig(r=2, lora_alpha=4, target_modules=TARGETS, init_lora_weights=init, **options)
    model = running()
    prepare(model, config)
    adapted = get_peft_model(model, config)
    adapted.peft_config["default"].init_lora_weights = True  # as PEFT's guide says, else it would be made anew
    adapted.save_pretrained(str(folder))
    adapted.peft_config["default"].init_lora_weights = init
    randomise(adapted, 0)
    return adapted


def assert_same(folder: Path, base: nn.Module, layers: ModelLayers, adapted: PeftModel) -> None:
    """The adapter in `folder` on `base` is the model as trained, and changes all of its targets."""
    adapter, _ = load_adapter(folder, layers, name="a", dtype=torch.float32, device="cpu")
    state = dict(base.state_dict())
    merge_into(state, adapter.deltas.values(), layers)
    expected = adapted.merge_and_unload().state_dict()
    for name in state:
        torch.testing.assert_close(state[name], expected[name], atol=1e-5, rtol=1e-5, msg=name)
    changed = [name for name in state if not torch.allclose(state[name], base.state_dict()[name])]
    assert len(changed) == len(TARGETS) * NUM_BLOCKS


@pytest.mark.parametrize("init", CONVERTED)
def test_a_converted_adapter_is_what_was_trained(init: str, tmp_path: Path) -> None:
    adapted = trained(init, tmp_path / "before")
    adapted.save_pretrained(str(tmp_path / "plain"), path_initial_model_for_weight_conversion=str(tmp_path / "before"))
    assert_same(tmp_path / "plain", BASE, LAYERS, adapted)


def test_loftq_over_the_base_model_that_it_made(tmp_path: Path) -> None:
    """As its refusal says: LoftQ's quantised weights are the base model, and the adapter is a plain one there."""
    adapted = trained("loftq", tmp_path / "before")
    base = copy.deepcopy(adapted).unload()
    adapted.peft_config["default"].init_lora_weights = True
    adapted.save_pretrained(str(tmp_path / "plain"))
    assert not torch.equal(base.layers[0].q_proj.weight, BASE.layers[0].q_proj.weight)
    assert_same(tmp_path / "plain", base, layers_of(base), adapted)


@pytest.mark.parametrize("init", CHANGING)
def test_as_it_is_it_is_refused_with_the_way_to_convert_it(init: str, tmp_path: Path) -> None:
    trained(init, tmp_path / "before").save_pretrained(str(tmp_path / "raw"))
    way = "base model that LoftQ saved" if init == "loftq" else "path_initial_model_for_weight_conversion"
    with pytest.raises(AdapterUnsupportedError, match=way) as caught:
        load_adapter(tmp_path / "raw", LAYERS, name="a", dtype=torch.float32, device="cpu")
    assert caught.value.option == "init_lora_weights"


@pytest.mark.parametrize("init", ["eva", "gaussian", "mica", "orthogonal", True, False])
def test_an_initialisation_that_leaves_the_base_alone(init: str | bool, tmp_path: Path) -> None:
    options = {"eva_config": EvaConfig(rho=1.5)} if init == "eva" else {}
    config = LoraConfig(r=2, lora_alpha=4, target_modules=TARGETS, init_lora_weights=init, **options)
    adapted = get_peft_model(running(), config)
    if init == "eva":
        batches = [{"input_ids": inputs()}]
        initialize_lora_eva_weights(adapted, batches, show_progress_bar=False)
        assert adapted.peft_config["default"].rank_pattern  # ranks are moved to where the variance is
    randomise(adapted, 0)
    adapted.save_pretrained(str(tmp_path))
    assert_same(tmp_path, BASE, LAYERS, adapted)
