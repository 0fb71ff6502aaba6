"""Models of published size, without weights: every linear layer is found in its component, under old and new names.

`configs/*.json` hold, for one published checkpoint each, the entries of its config that shape the model, its size as
published, and module names as adapters have them -> as the model has them now.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from polylens.adapters.names import Found, LayerNames
from polylens.core import Component, LayerKind, ModelLayers
from polylens.models.components import model_layers
from polylens.models.loading import auto_class, is_text_only
from tests.families.adapters import component_of

PUBLISHED = {path.stem: json.loads(path.read_text()) for path in sorted(Path(__file__).parent.glob("configs/*.json"))}
COMPONENTS = {
    "tower": Component.VISION_TOWER,
    "connector": Component.CONNECTOR,
    "language": Component.LANGUAGE_MODEL,
}


@cache
def outline(name: str) -> tuple[PreTrainedModel, ModelLayers]:
    fields: dict[str, Any] = dict(PUBLISHED[name]["config"])
    config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    return model, model_layers(model)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_size_is_the_published_one(name: str) -> None:
    """The entries written down here are the real ones."""
    model, _ = outline(name)
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    assert billions == pytest.approx(PUBLISHED[name]["parameters_in_billions"], rel=0.01)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_linear_layer_is_found_in_its_component(name: str) -> None:
    model, layers = outline(name)
    # Llama 4's router is one by inheritance only, and of a kind of its own.
    linear = {path: module for path, module in model.named_modules() if type(module) is nn.Linear}
    found = {path: spec for path, spec in layers.specs.items() if spec.kind is LayerKind.LINEAR}
    assert found.keys() == linear.keys()
    for path, spec in found.items():
        assert (spec.in_features, spec.out_features) == (linear[path].in_features, linear[path].out_features)
    wanted = {path: "language" if is_text_only(model.config) else component_of(path) for path in found}
    assert {path: spec.component for path, spec in found.items()} == {
        path: COMPONENTS[component] for path, component in wanted.items()
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_block_has_its_layers(name: str) -> None:
    """As many attention projections as the config has layers: nothing is left out by a name that repeats."""
    model, layers = outline(name)
    text: Any = model.config.get_text_config()
    outputs = [path for path in layers.specs if path.endswith(("self_attn.o_proj", "cross_attn.o_proj"))]
    in_text = [path for path in outputs if layers.specs[path].component is Component.LANGUAGE_MODEL]
    assert len(in_text) == text.num_hidden_layers == layers.num_text_layers


@pytest.mark.parametrize("name", PUBLISHED)
def test_old_and_new_names_lead_to_the_same_layer(name: str) -> None:
    _, layers = outline(name)
    names = LayerNames(layers)
    for given, path in PUBLISHED[name]["names"].items():
        for spelled in (given, path):
            hit = names.find(spelled)
            assert isinstance(hit, Found), (spelled, hit)
            assert hit.spec.name == path, spelled
