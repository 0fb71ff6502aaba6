"""Which layer belongs to which component, in all five families."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn
from transformers import AutoModelForImageTextToText

from polylens.core import Component, LayerKind
from polylens.models.components import model_layers
from polylens.models.parts import audio_path
from tests.families.build import FAMILIES

Checkpoint = Callable[[str], Path]

CONNECTORS = {
    "qwen2_vl": {"model.visual.merger.mlp.0", "model.visual.merger.mlp.2"},
    "qwen2_5_vl": {"model.visual.merger.mlp.0", "model.visual.merger.mlp.2"},
    "qwen3_vl": {
        f"model.visual.{merger}.linear_fc{i}"
        for merger in ("merger", "deepstack_merger_list.0", "deepstack_merger_list.1")
        for i in (1, 2)
    },
    "gemma3": {"model.multi_modal_projector.mm_input_projection_weight"},
    "llava": {"model.multi_modal_projector.linear_1", "model.multi_modal_projector.linear_2"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_has_its_component(family: str, checkpoint: Checkpoint) -> None:
    model = AutoModelForImageTextToText.from_pretrained(checkpoint(family))
    layers = model_layers(model)
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert linears == {name for name, spec in layers.specs.items() if spec.kind is LayerKind.LINEAR}
    by_component = {
        component: {
            name
            for name, spec in layers.specs.items()
            if spec.component is component and spec.kind in (LayerKind.LINEAR, LayerKind.MATMUL)
        }
        for component in Component
    }
    assert by_component[Component.CONNECTOR] == CONNECTORS[family]
    assert "lm_head" in by_component[Component.LANGUAGE_MODEL]
    assert all("language_model" in name or name == "lm_head" for name in by_component[Component.LANGUAGE_MODEL])
    assert all("vis" in name for name in by_component[Component.VISION_TOWER])


def test_an_encoder_of_text_and_pictures_is_divided(checkpoint: Checkpoint) -> None:
    model = AutoModelForImageTextToText.from_pretrained(checkpoint("t5gemma2"))
    specs = model_layers(model).specs.values()
    towers = {"vision_tower": Component.VISION_TOWER, "multi_modal_projector": Component.CONNECTOR}
    assert {spec.component for spec in specs} == set(Component)
    for spec in specs:
        expected = [component for name, component in towers.items() if name in spec.name]
        assert [spec.component] == (expected or [Component.LANGUAGE_MODEL]), spec.name
    assert audio_path(model) is None


@pytest.mark.parametrize(
    ("family", "old", "new"),
    [
        ("qwen2_5_vl", "visual.blocks.0.attn.qkv", "model.visual.blocks.0.attn.qkv"),
        ("qwen2_vl", "model.layers.1.mlp.down_proj", "model.language_model.layers.1.mlp.down_proj"),
        ("gemma3", "language_model.model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj"),
        (
            "llava",
            "vision_tower.vision_model.encoder.layers.0.mlp.fc1",
            "model.vision_tower.encoder.layers.0.mlp.fc1",
        ),
        ("llava", "language_model.lm_head", "lm_head"),
    ],
)
def test_old_names_are_renamed(family: str, old: str, new: str, checkpoint: Checkpoint) -> None:
    layers = model_layers(AutoModelForImageTextToText.from_pretrained(checkpoint(family)))
    assert layers.rename(old) == new
    assert layers.rename(new) == new
    assert new in layers.specs
