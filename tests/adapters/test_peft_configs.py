"""Property: for any config that PEFT takes, what is read from its file merges to PEFT's own merged weights."""

from __future__ import annotations

import copy
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from polylens.adapters import load_adapter, merge_into
from polylens.core import Component, LayerKind, LayerSpec, ModelLayers

WIDTH, VOCABULARY, NUM_BLOCKS = 6, 9, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, 4)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(WIDTH, 8), "fc2": nn.Linear(8, WIDTH)})


class Toy(nn.Module):
    """One of every kind of layer that PEFT and polylens both change. Never run: only its weights are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def layers_of(model: nn.Module) -> ModelLayers:
    kinds = {
        nn.Linear: LayerKind.LINEAR,
        nn.Conv2d: LayerKind.CONV,
        nn.LayerNorm: LayerKind.NORM,
        nn.Embedding: LayerKind.EMBEDDING,
    }
    specs = {}
    for name, module in model.named_modules():
        if kind := kinds.get(type(module)):
            weight = module.get_parameter("weight")
            out, inputs = weight.shape[0], weight[0].numel()
            sides = {LayerKind.EMBEDDING: (out, inputs), LayerKind.NORM: (out, out)}.get(kind, (inputs, out))
            specs[name] = LayerSpec(name, Component.LANGUAGE_MODEL, kind, *sides)
    return ModelLayers(specs, lambda path: path, "toy", "Toy", NUM_BLOCKS, parameters=dict(model.named_parameters()))


torch.manual_seed(0)
BASE = Toy()
LAYERS = layers_of(BASE)

LEAVES = ["q_proj", "k_proj", "fc1", "fc2"]
targets = st.one_of(
    st.lists(st.sampled_from([*LEAVES, "patch", "lm_head"]), min_size=1, unique=True),
    st.sampled_from(["all-linear", r".*\.(q_proj|fc1)", r"layers\.[02]\.mlp\..*", "layers.1.k_proj"]),
)
patterns = st.sampled_from(["q_proj", "layers.1.q_proj", r"layers\.\d\.mlp\.fc1", r".*fc2", "^layers.0.k_proj", "fc"])


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Options of a `LoraConfig`, only combinations that PEFT itself accepts."""
    extra = draw(st.sampled_from(["none", "dora", "lora_bias", "embedding", "embedding dora", "tokens"]))
    target = draw(targets)
    if extra.startswith("embedding") and isinstance(target, list):
        target = [*target, "embed_tokens"]
    saved = draw(st.lists(st.sampled_from(["norm", "lm_head", "embed_tokens"]), unique=True, max_size=2))
    targeted = target if isinstance(target, list) else []
    if extra in ("embedding", "embedding dora", "tokens"):
        saved = [name for name in saved if name != "embed_tokens"]
    options: dict[str, Any] = {
        "r": draw(st.integers(1, 5)),
        "lora_alpha": draw(st.integers(1, 32)),
        "target_modules": target,
        "use_rslora": draw(st.booleans()),
        "bias": draw(st.sampled_from(["none", "all", "lora_only"])),
        "rank_pattern": _as_in_a_file(draw(st.dictionaries(patterns, st.integers(1, 6), max_size=2))),
        "alpha_pattern": _as_in_a_file(draw(st.dictionaries(patterns, st.integers(1, 9), max_size=2))),
        "modules_to_save": [name for name in saved if name not in targeted] or None,
        "use_dora": extra.endswith("dora"),
        "lora_bias": extra == "lora_bias",
        "trainable_token_indices": [5, 1, 7] if extra == "tokens" else None,
    }
    if isinstance(target, list) and draw(st.booleans()):
        options["layers_to_transform"] = draw(st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, unique=True))
        options["layers_pattern"] = "layers"
    elif draw(st.booleans()):
        options["exclude_modules"] = draw(st.sampled_from([["fc2"], ["layers.0.q_proj"], r".*layers\.1\..*"]))
    return options


def _as_in_a_file(pattern: dict[str, int]) -> dict[str, int]:
    """Sorted: the first key that matches counts, and PEFT cannot load what it trained with keys in another order."""
    return dict(sorted(pattern.items()))


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # a failure names its options, which are small as they are
)
@given(configs(), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), st.integers(0, 99))
def test_merged_weights_equal_pefts(options: dict[str, Any], dtype: torch.dtype, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            adapted = get_peft_model(copy.deepcopy(BASE), LoraConfig(**options))
        except ValueError:
            return  # nothing left to train, or a combination that PEFT refuses
        randomise(adapted, seed)
        if dtype is not torch.float32:
            adapted = adapted.to(dtype)
        adapted.save_pretrained(folder)
        expected = PeftModel.from_pretrained(copy.deepcopy(BASE), folder).merge_and_unload().state_dict()
        adapter, _ = load_adapter(Path(folder), LAYERS, name="a", dtype=torch.float32, device="cpu")
    state = dict(BASE.state_dict())
    merge_into(state, adapter.deltas.values(), LAYERS)
    assert state.keys() == expected.keys()
    for name in state:
        torch.testing.assert_close(state[name], expected[name].float(), atol=2e-5, rtol=2e-5, msg=f"{name}: {options}")


@torch.no_grad()
def randomise(adapted: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(adapted.named_parameters()):
        if parameter.requires_grad:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
