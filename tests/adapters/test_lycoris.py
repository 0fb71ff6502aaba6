"""LoHa and LoKr: the factors made of them merge to PEFT's own merged weights."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from peft import LoHaConfig, LoKrConfig, PeftModel, get_peft_model
from torch import nn

from polylens.adapters import load_adapter, merge_into
from polylens.adapters.lycoris import lycoris_factors
from polylens.core import Delta
from tests.adapters.test_peft_configs import BASE, LAYERS, LEAVES, patterns, randomise


@st.composite
def configs(draw: st.DrawFn) -> LoHaConfig | LoKrConfig:
    target = draw(
        st.one_of(
            st.lists(st.sampled_from([*LEAVES, "patch", "lm_head"]), min_size=1, unique=True),
            st.just(r".*\.(q_proj|fc1)"),
        )
    )
    options: dict[str, Any] = {
        "r": draw(st.integers(1, 5)),
        "alpha": draw(st.integers(1, 16)),
        "target_modules": target,
        # One only: PEFT sorts patterns when it saves, so of two that match a layer another one may count afterwards.
        "rank_pattern": draw(st.dictionaries(patterns, st.integers(1, 4), max_size=1)),
        "alpha_pattern": draw(st.dictionaries(patterns, st.integers(1, 9), max_size=1)),
        "use_effective_conv2d": draw(st.booleans()),
        "modules_to_save": draw(st.sampled_from([None, ["norm"]])),
        "init_weights": False,
    }
    if draw(st.booleans()):
        return LoHaConfig(**options)
    factor = draw(st.sampled_from([-1, 2, 3]))
    return LoKrConfig(**options, decompose_both=draw(st.booleans()), decompose_factor=factor)


@settings(
    max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
@given(configs(), st.integers(0, 99))
def test_merged_weights_equal_pefts(
    tmp_path_factory: pytest.TempPathFactory, config: LoHaConfig | LoKrConfig, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("lycoris")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(copy.deepcopy(BASE), config)
        randomise(adapted, seed)
        adapted.save_pretrained(folder)
        expected = PeftModel.from_pretrained(copy.deepcopy(BASE), str(folder)).merge_and_unload().state_dict()
    adapter, report = load_adapter(Path(folder), LAYERS, name="a", dtype=torch.float32, device="cpu")
    state = dict(BASE.state_dict())
    merge_into(state, adapter.deltas.values(), LAYERS)
    assert state.keys() == expected.keys()
    for name in state:
        torch.testing.assert_close(state[name], expected[name], atol=2e-5, rtol=2e-5, msg=f"{name}: {config}")
    assert report.num_tensors == len(json.loads(_header(folder / "adapter_model.safetensors"))) - 1


def _header(file: Path) -> str:
    content = file.read_bytes()
    return content[8 : 8 + int.from_bytes(content[:8], "little")].decode()


def test_ranks_are_small_where_that_is_exact() -> None:
    """LoHa of rank 2 on a wide layer: rank 4, not the layer's width; LoKr through its smallest dimension."""
    loha = {"hada_w1_a": (64, 2), "hada_w1_b": (2, 48), "hada_w2_a": (64, 2), "hada_w2_b": (2, 48)}
    assert rank_of(loha) == 4
    assert rank_of({name: tuple(8 if side == 2 else side for side in shape) for name, shape in loha.items()}) == 48
    lokr = {"lokr_w1": (4, 4), "lokr_w2_a": (16, 3), "lokr_w2_b": (3, 12)}
    assert rank_of(lokr) == 12
    assert rank_of({"lokr_w1_a": (8, 1), "lokr_w1_b": (1, 8), "lokr_w2": (4, 6)}) == 4


def rank_of(shapes: dict[str, tuple[int, ...]]) -> int:
    factors = lycoris_factors({name: torch.randn(shape) for name, shape in shapes.items()})
    assert not isinstance(factors, str)
    return factors.a.shape[0]


def test_on_linear_layers_it_is_a_plain_delta(tmp_path: Path) -> None:
    """So the fast path, sums of adapters and caches know nothing of it."""
    model = copy.deepcopy(BASE)
    adapted = get_peft_model(model, LoHaConfig(r=1, target_modules=["q_proj"], init_weights=False))
    adapted.save_pretrained(tmp_path)
    adapter, _ = load_adapter(tmp_path, LAYERS, name="a", dtype=torch.float32, device="cpu")
    assert all(type(change) is Delta and change.rank == 1 for change in adapter.deltas.values())
    assert not adapter.special
    assert isinstance(model, nn.Module)
