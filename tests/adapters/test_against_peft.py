"""What an adapter adds must be what PEFT's merge adds, in every family, under every naming generation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from polylens.adapters import load_adapter, merge_into
from polylens.core import Component, LayerKind, LayerSpec, ModelLayers
from polylens.errors import AdapterMismatchError
from polylens.models.components import model_layers, renamer
from tests.families.adapters import make_adapter
from tests.families.build import FAMILIES

CheckpointOf = Callable[[str], Path]


@lru_cache
def layers_of(checkpoint: Path) -> ModelLayers:
    return model_layers(AutoModelForImageTextToText.from_pretrained(checkpoint))


def load(path: Path, layers: ModelLayers):
    return load_adapter(path, layers, name="a", dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("use_rslora", [False, True])
def test_merge_equals_peft(family: str, use_rslora: bool, checkpoint: CheckpointOf, tmp_path: Path) -> None:
    folder = checkpoint(family)
    path = make_adapter(
        folder,
        tmp_path,
        targets="all",
        rank=4,
        rank_pattern={"q_proj": 8, r"layers\.1\..*v_proj": 2},
        seed=1,
        use_rslora=use_rslora,
    )
    layers = layers_of(folder)
    adapter, report = load(path, layers)
    assert set(report.components) == set(Component)
    assert report.num_tensors == len(load_file(path / "adapter_model.safetensors"))
    assert not report.warnings
    base = AutoModelForImageTextToText.from_pretrained(folder)
    state = dict(base.state_dict())
    merge_into(state, adapter.deltas.values(), layers)
    expected = PeftModel.from_pretrained(base, str(path)).merge_and_unload().state_dict()
    for name in state:
        torch.testing.assert_close(state[name], expected[name], atol=1e-6, rtol=1e-5, msg=name)


def test_gemma_projector_orientation(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    """y += s (x Aᵀ) Bᵀ on the rows that enter the bare parameter is what PEFT's merged parameter does."""
    folder = checkpoint("gemma3")
    path = make_adapter(folder, tmp_path, targets="connector", seed=2)
    adapter, _ = load(path, layers_of(folder))
    name = "model.multi_modal_projector.mm_input_projection_weight"
    delta = adapter.deltas[name]
    base = AutoModelForImageTextToText.from_pretrained(folder)
    before = base.get_parameter(name).detach().clone()
    merged = PeftModel.from_pretrained(base, str(path)).merge_and_unload().get_parameter(name)
    x = torch.randn(5, before.shape[0])
    y = x @ before + delta.scaling * (x @ delta.a.T) @ delta.b.T
    torch.testing.assert_close(y, x @ merged)
    assert not torch.allclose(before, merged)


OLD_NAMES: dict[str, list[tuple[str, str]]] = {
    "qwen2_vl": [(r"^model\.visual\.", "visual."), (r"^model\.language_model\.", "model.")],
    "qwen2_5_vl": [(r"^model\.visual\.", "visual."), (r"^model\.language_model\.", "model.")],
    "qwen3_vl": [],
    "gemma3": [
        (r"^model\.language_model\.", "language_model.model."),
        (r"^model\.vision_tower\.", "vision_tower.vision_model."),
        (r"^model\.multi_modal_projector", "multi_modal_projector"),
        (r"^lm_head", "language_model.lm_head"),
    ],
    "llava": [
        (r"^model\.language_model\.", "language_model.model."),
        (r"^model\.vision_tower\.", "vision_tower.vision_model."),
        (r"^model\.multi_modal_projector", "multi_modal_projector"),
        (r"^lm_head", "language_model.lm_head"),
    ],
}
"""How transformers up to 4.51 named modules (and 4.52 to 4.57 with `model.` before the tower)."""


def rewrite(source: Path, target: Path, change: Callable[[str], str]) -> Path:
    target.mkdir()
    (target / "adapter_config.json").write_text((source / "adapter_config.json").read_text())
    tensors = load_file(source / "adapter_model.safetensors")
    save_file({change(name): tensor for name, tensor in tensors.items()}, target / "adapter_model.safetensors")
    return target


def old_name(family: str, key: str) -> str:
    module = key.removeprefix("base_model.model.")
    for pattern, replacement in OLD_NAMES[family]:
        module = re.sub(pattern, replacement, module)
    return f"base_model.model.{module}"


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_every_generation(family: str, checkpoint: CheckpointOf, tmp_path: Path) -> None:
    """The same tensors under any trainer's names are the same adapter: equal digests."""
    layers = layers_of(checkpoint(family))
    path = make_adapter(checkpoint(family), tmp_path / "new", targets="all", rank_pattern={"q_proj": 8}, seed=3)
    adapter, _ = load(path, layers)
    vision_model = re.compile(r"(model\.vision_tower\.)")
    spellings: dict[str, Callable[[str], str]] = {
        "old": lambda key: old_name(family, key),
        "4.52": lambda key: vision_model.sub(r"\1vision_model.", key) if family in ("gemma3", "llava") else key,
        "bare": lambda key: key.removeprefix("base_model.model."),
        "named": lambda key: re.sub(r"\.lora_([AB])\.weight$", r".lora_\1.default.weight", key),
        "old and bare": lambda key: old_name(family, key).removeprefix("base_model.model."),
        "wrapped": lambda key: key.replace("base_model.model.", "module.base_model.model."),
        "inner": lambda key: key.replace("base_model.model.model.", "base_model.model."),
    }
    for label, change in spellings.items():
        other, report = load(rewrite(path, tmp_path / label, change), layers)
        assert other.digests == adapter.digests, label
        assert not report.warnings, (label, report.warnings)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_name_renames_to_itself(family: str, checkpoint: CheckpointOf) -> None:
    layers = layers_of(checkpoint(family))
    assert all(layers.rename(name) == name for name in layers.specs)


def test_adapter_of_another_family(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    path = make_adapter(checkpoint("llava"), tmp_path, targets="tower", seed=4)
    content = json.loads((path / "adapter_config.json").read_text())
    assert content["base_model_name_or_path"]
    with pytest.raises(AdapterMismatchError, match="seems made for another base model") as caught:
        load(path, layers_of(checkpoint("qwen2_vl")))
    assert len(caught.value.problems) == len(load_file(path / "adapter_model.safetensors")) // 2


def text_model_of(folder: Path) -> PreTrainedModel:
    """The causal language model that the family's text model comes from, with random weights."""
    own = AutoConfig.from_pretrained(folder).get_text_config()
    plain = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}.get(own.model_type)
    if plain is None:
        return AutoModelForCausalLM.from_config(own)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    more = {"head_dim": own.head_dim} if plain == "qwen3" else {}
    shape = {name: getattr(own, name) for name in (*sizes, "num_key_value_heads")}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(plain, **shape, **more))


def text_layers_of(model: PreTrainedModel) -> ModelLayers:
    specs = {
        name: LayerSpec(name, Component.LANGUAGE_MODEL, LayerKind.LINEAR, module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    embedding = model.get_input_embeddings()
    spec = LayerSpec("model.embed_tokens", Component.LANGUAGE_MODEL, LayerKind.EMBEDDING, *embedding.weight.shape)
    return ModelLayers({**specs, spec.name: spec}, renamer(model), "text", "Text", 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_the_text_model_alone(family: str, checkpoint: CheckpointOf, tmp_path: Path) -> None:
    """Saved by PEFT from the causal language model: on the whole model it is the same update of the same layers."""
    text = text_model_of(checkpoint(family))
    names = [name for name, module in text.named_modules() if isinstance(module, nn.Linear)]
    layers = text_layers_of(text)
    adapted = get_peft_model(text, LoraConfig(r=2, target_modules=names, init_lora_weights=False))
    adapted.save_pretrained(str(tmp_path), save_embedding_layers=False)
    assert "lm_head" in names
    on_text, _ = load(tmp_path, layers)
    on_whole, report = load(tmp_path, layers_of(checkpoint(family)))
    renamed = {name.removeprefix("model."): delta for name, delta in on_text.deltas.items()}
    assert {name.removeprefix("model.language_model."): delta.rank for name, delta in on_whole.deltas.items()} == {
        name: delta.rank for name, delta in renamed.items()
    }
    for name, delta in on_whole.deltas.items():
        own = renamed[name.removeprefix("model.language_model.")]
        assert torch.equal(delta.a, own.a)
        assert torch.equal(delta.b, own.b)
    assert list(report.components) == [Component.LANGUAGE_MODEL]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_language_part_on_the_text_model_alone(family: str, checkpoint: CheckpointOf, tmp_path: Path) -> None:
    """Under today's names and old ones; what is for tower and connector is told, as no request can reach it."""
    path = make_adapter(checkpoint(family), tmp_path / "new", targets="all", seed=3)
    layers = text_layers_of(text_model_of(checkpoint(family)))
    whole, _ = load(path, layers_of(checkpoint(family)))
    language = {name: delta for name, delta in whole.deltas.items() if "language_model" in name or name == "lm_head"}
    old = rewrite(path, tmp_path / "old", lambda key: old_name(family, key))
    for folder in (path, old):
        adapter, report = load(folder, layers)
        assert {name.replace("model.", "model.language_model.", 1) for name in adapter.deltas} == language.keys()
        left_out = 2 * (len(whole.deltas) - len(language))
        assert report.num_copies == left_out
        assert f"{left_out} tensors are for a vision part" in report.warnings[-1]
        assert report.num_tensors == len(load_file(path / "adapter_model.safetensors"))


def test_a_tower_adapter_is_nothing_for_a_text_model(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    path = make_adapter(checkpoint("qwen2_vl"), tmp_path, targets="tower", seed=3)
    with pytest.raises(AdapterMismatchError, match="only for a vision part"):
        load(path, text_layers_of(text_model_of(checkpoint("qwen2_vl"))))
