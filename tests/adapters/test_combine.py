"""Weighted combinations against PEFT's `add_weighted_adapter(combination_type="cat")`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForImageTextToText

from polylens import LLM
from polylens.adapters import Combination, load_adapter, merge_into
from polylens.errors import AdapterFormatError, AdapterUnsupportedError, UnknownAdapterError
from polylens.models.components import model_layers
from tests.adapters.fake_layers import CONNECTOR, LANGUAGE, TOWER, factors, fake_layers, write_adapter
from tests.adapters.test_peft_configs import BASE, LAYERS, randomise
from tests.families.adapters import make_adapter
from tests.families.special import make_special

WEIGHTS = {"a": 0.7, "b": -0.3}


def test_equals_peft(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint("qwen2_vl")
    paths = {
        "a": make_adapter(folder, tmp_path / "a", targets="all", rank=4, seed=1),
        "b": make_adapter(folder, tmp_path / "b", targets="connector+language", rank=6, seed=2, use_rslora=True),
    }
    base = AutoModelForImageTextToText.from_pretrained(folder)
    layers = model_layers(base)
    combination = Combination.of({paths[name]: weight for name, weight in WEIGHTS.items()})
    adapter, report = load_adapter(combination, layers, name="mix", dtype=torch.float32, device="cpu")
    state = dict(base.state_dict())
    merge_into(state, adapter.deltas.values(), layers)
    assert report.source == f"0.7 * {paths['a']} + -0.3 * {paths['b']}"
    peft = PeftModel.from_pretrained(base, str(paths["a"]), adapter_name="a")
    peft.load_adapter(str(paths["b"]), "b")
    peft.add_weighted_adapter(list(WEIGHTS), list(WEIGHTS.values()), "mix", combination_type="cat")
    peft.set_adapter("mix")
    expected = peft.merge_and_unload().state_dict()
    for name in state:
        torch.testing.assert_close(state[name], expected[name], atol=1e-5, rtol=1e-4, msg=name)


def saved(folder: Path, seed: int, **options: Any) -> Path:
    options = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "patch", "lm_head"], **options}
    adapted = get_peft_model(copy.deepcopy(BASE), LoraConfig(**options))
    randomise(adapted, seed)
    adapted.save_pretrained(str(folder))
    return folder


def test_layers_that_are_not_linear_equal_pefts(tmp_path: Path) -> None:
    """A patch embedding, the token embedding and the head; ranks and scalings by pattern."""
    targets = ["q_proj", "patch", "embed_tokens", "lm_head"]
    one = saved(tmp_path / "a", 1, target_modules=targets, rank_pattern={"layers.1.q_proj": 4})
    two = saved(tmp_path / "b", 2, target_modules=targets, use_rslora=True, alpha_pattern={"patch": 9})
    adapter, _ = load_adapter(
        Combination.of({one: 0.7, two: -0.3}), LAYERS, name="mix", dtype=torch.float32, device="cpu"
    )
    state = dict(BASE.state_dict())
    merge_into(state, adapter.deltas.values(), LAYERS)
    peft = PeftModel.from_pretrained(copy.deepcopy(BASE), str(one), adapter_name="a")
    peft.load_adapter(str(two), "b")
    peft.add_weighted_adapter(["a", "b"], [0.7, -0.3], "mix", combination_type="cat")
    peft.set_adapter("mix")
    expected = peft.merge_and_unload().state_dict()
    for name in state:
        torch.testing.assert_close(state[name], expected[name], atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"lora_bias": True},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"modules_to_save": ["norm"]},
        {"trainable_token_indices": [1]},
    ],
    ids=str,
)
def test_more_than_factors_has_no_sum(options: dict[str, Any], tmp_path: Path) -> None:
    plain, other = saved(tmp_path / "a", 1), saved(tmp_path / "b", 2, **options)
    with pytest.raises(AdapterUnsupportedError, match="which cannot be summed") as caught:
        load_adapter(Combination.of({plain: 1, other: 1}), LAYERS, name="a", dtype=torch.float32, device="cpu")
    assert caught.value.option == "combination"


def test_in_an_engine(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """1 times an adapter is that adapter; parts may be unloaded afterwards; what is not loaded has no weight."""
    folder = checkpoint("qwen2_vl")
    a = make_adapter(folder, tmp_path / "a", targets="connector+language", seed=1)
    dora = make_special(folder, tmp_path / "dora", "dora", seed=2)
    with LLM(folder, {"a": a, "dora": dora}) as llm:
        llm.combine_adapters("same", {"a": 1.0})
        llm.combine_adapters("half", {"a": 0.5})
        messages = [{"role": "user", "content": "what is seven plus five?"}]
        one, same, half = (llm.chat(messages, adapter=name) for name in ("a", "same", "half"))
        assert one.token_ids == same.token_ids
        assert half.token_ids != one.token_ids
        llm.unload_adapter("a")
        assert llm.chat(messages, adapter="same").token_ids == same.token_ids
        with pytest.raises(UnknownAdapterError):
            llm.combine_adapters("mix", {"a": 1.0})
        with pytest.raises(AdapterUnsupportedError, match="which cannot be summed"):
            llm.combine_adapters("mix", {"dora": 0.5, "same": 0.5})


@pytest.mark.parametrize(
    "weights", [{}, {"a": 0}, {"a": float("nan")}, {"a": True}, {"a": "1"}, [("a", 1.0)], None], ids=repr
)
def test_weights(weights: object) -> None:
    with pytest.raises(AdapterFormatError):
        Combination.of(weights)  # type: ignore[arg-type]


def test_layers_of_any_part(tmp_path: Path) -> None:
    one = write_adapter(tmp_path / "a", {**factors(TOWER), **factors(LANGUAGE, seed=1)})
    two = write_adapter(tmp_path / "b", {**factors(CONNECTOR), **factors(LANGUAGE, seed=2)})
    combination = Combination.of({one: 0.5, two: 2})
    adapter, report = load_adapter(combination, fake_layers(), name="mix", dtype=torch.float32, device="cpu")
    assert {name: delta.rank for name, delta in adapter.deltas.items()} == {TOWER: 2, CONNECTOR: 2, LANGUAGE: 4}
    assert report.num_tensors == 8


@pytest.mark.parametrize("weight", [0, float("nan"), float("inf"), 10**400, True, "1"])
def test_a_weight_that_is_no_usable_number_is_refused(weight: object) -> None:
    with pytest.raises(AdapterFormatError, match="finite number"):
        Combination.of({"a": weight})  # type: ignore[dict-item]
