"""A `ModelLayers` without a model, and adapter folders for it, written by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from polylens.adapters.load import LoadReport, load_adapter
from polylens.core import Adapter, Component, LayerKind, LayerSpec, ModelLayers
from polylens.errors import AdapterMismatchError

NUM_LAYERS = 3
IN, OUT = 6, 8

TOWER = "model.visual.blocks.0.attn.qkv"
CONNECTOR = "model.visual.merger.mlp.0"
PARAMETER = "model.projector.input_weight"
LANGUAGE = "model.language_model.layers.0.self_attn.q_proj"
CONVOLUTION = "model.visual.patch_embed.proj"
PATCH = (3, 2, 4, 4)
"""Kernel of the convolution: channels, frames, height, width."""
NORM = "model.visual.norm"
EMBEDDING = "model.language_model.embed_tokens"
VOCABULARY = 11
POSITIONS = "model.visual.pos_embed"


def _rename(path: str) -> str:
    """Old names of this made-up model: `visual.*`, `model.layers.*`."""
    if path.startswith("visual."):
        return f"model.{path}"
    if path.startswith(("model.layers.", "model.embed_tokens")):
        return f"model.language_model.{path.removeprefix('model.')}"
    return path


def fake_layers() -> ModelLayers:
    specs = [
        LayerSpec(TOWER, Component.VISION_TOWER, LayerKind.LINEAR, IN, OUT),
        LayerSpec(CONNECTOR, Component.CONNECTOR, LayerKind.LINEAR, IN, OUT),
        LayerSpec(PARAMETER, Component.CONNECTOR, LayerKind.MATMUL, IN, OUT),
        LayerSpec("lm_head", Component.LANGUAGE_MODEL, LayerKind.LINEAR, IN, OUT),
        LayerSpec(CONVOLUTION, Component.VISION_TOWER, LayerKind.CONV, math.prod(PATCH), OUT),
        LayerSpec(NORM, Component.VISION_TOWER, LayerKind.NORM, IN, IN),
        LayerSpec(EMBEDDING, Component.LANGUAGE_MODEL, LayerKind.EMBEDDING, VOCABULARY, IN),
        *(
            LayerSpec(
                f"model.language_model.layers.{index}.self_attn.{name}",
                Component.LANGUAGE_MODEL,
                LayerKind.LINEAR,
                IN,
                OUT,
            )
            for index in range(NUM_LAYERS)
            for name in ("q_proj", "v_proj")
        ),
    ]
    return ModelLayers(
        specs={spec.name: spec for spec in specs},
        rename=_rename,
        model_type="fake_vl",
        model_class="FakeForConditionalGeneration",
        num_text_layers=NUM_LAYERS,
        other_modules={POSITIONS: "Embedding"},
        parameters=_parameters(specs),
    )


def _parameters(specs: list[LayerSpec]) -> dict[str, torch.Tensor]:
    """Random base weights; biases for norms and for the tower's and connector's layers."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in specs:
        o, i = spec.out_features, spec.in_features
        weight = spec.name if spec.kind is LayerKind.MATMUL else f"{spec.name}.weight"
        shapes[weight] = {
            LayerKind.LINEAR: (o, i),
            LayerKind.MATMUL: (i, o),
            LayerKind.CONV: (o, *PATCH),
            LayerKind.NORM: (o,),
            LayerKind.EMBEDDING: (i, o),
        }[spec.kind]
        if spec.kind is LayerKind.NORM or (spec.kind is LayerKind.LINEAR and "visual" in spec.name):
            shapes[f"{spec.name}.bias"] = (o,)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def factors(module: str, rank: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A and B of one module, named as PEFT names them in a file."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"base_model.model.{module}.lora_A.weight": torch.randn(rank, IN, generator=generator).to(dtype),
        f"base_model.model.{module}.lora_B.weight": torch.randn(OUT, rank, generator=generator).to(dtype),
    }


def config(**options: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "qkv"], **options}


def write_adapter(
    folder: Path, tensors: Mapping[str, torch.Tensor], options: Mapping[str, Any] | None = None, *, binary: bool = False
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config() if options is None else dict(options)))
    if binary:
        torch.save(dict(tensors), folder / "adapter_model.bin")
    else:
        save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def load(
    folder: Path, tensors: dict[str, torch.Tensor], layers: ModelLayers | None = None, **options: Any
) -> tuple[Adapter, LoadReport]:
    """Write the adapter to `folder` and load it onto `layers` (the made-up model's)."""
    write_adapter(folder, tensors, config(**options))
    dtype = options.pop("dtype", torch.float32)
    return load_adapter(folder, layers or fake_layers(), name="a", dtype=dtype, device="cpu")


def mismatch(folder: Path, tensors: dict[str, torch.Tensor], *words: str, **options: Any) -> AdapterMismatchError:
    """The error of such a `load`, which has the words in its one line."""
    with pytest.raises(AdapterMismatchError) as caught:
        load(folder, tensors, **options)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value
