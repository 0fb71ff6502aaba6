"""The base model's own parameters, which an adapter's file may repeat, replace, or share between two layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polylens.adapters.names import Found
from polylens.core import LayerKind

if TYPE_CHECKING:
    from polylens.adapters.names import LayerNames
    from polylens.adapters.pairs import WholeTensor
    from polylens.core import LayerSpec, ModelLayers


def expected_shape(spec: LayerSpec, role: str, layers: ModelLayers) -> tuple[int, ...] | None:
    """The shape of the base layer's own parameter; None if it has none."""
    own = layers.parameters.get(spec.state_name(role))
    return None if own is None else tuple(own.shape)


def is_own_parameter(part: WholeTensor, names: LayerNames, layers: ModelLayers) -> bool:
    """Whether the tensor is of a module that takes no delta, and the model's own."""
    if isinstance(names.find(part.module), Found):
        return False
    paths = {part.module, layers.rename(part.module)}
    owned = (layers.parameters.get(f"{path}.{part.parameter}") for path in paths)
    return any(value is not None and value.shape == part.value.shape and is_copy(part.value, value) for value in owned)


def is_copy(value: torch.Tensor, base: torch.Tensor | None) -> bool:
    """Whether a saved parameter is the base model's own (to the dtype the model runs in)."""
    if base is None or base.is_meta:
        return False
    return bool(torch.equal(value.to(base.dtype), base.cpu()))


def tied_layers(layers: ModelLayers) -> set[str]:
    """The token embedding and the heads that share its weight; empty where none does."""
    embeddings = [spec for spec in layers.specs.values() if spec.kind is LayerKind.EMBEDDING]
    return {name for spec in embeddings for head in tied_heads(spec, layers) for name in (spec.name, head)}


def tied_heads(spec: LayerSpec, layers: ModelLayers) -> tuple[str, ...]:
    """Linear layers whose weight is the embedding's own: PEFT trains their rows together."""
    # Parameters that are read from files when they are looked up have an outline, whose objects tell them apart.
    parameters = getattr(layers.parameters, "outline", layers.parameters)
    weight = parameters.get(spec.state_name())
    return tuple(
        name
        for name, other in layers.specs.items()
        if weight is not None and other.kind is LayerKind.LINEAR and parameters.get(other.state_name()) is weight
    )


def is_of_tokens(spec: LayerSpec) -> bool:
    """Whether it is the token embedding or the head: one row of weights a token."""
    return spec.kind is LayerKind.EMBEDDING or (spec.kind is LayerKind.LINEAR and spec.name.endswith("lm_head"))


def num_tokens(spec: LayerSpec) -> int:
    return spec.in_features if spec.kind is LayerKind.EMBEDDING else spec.out_features
