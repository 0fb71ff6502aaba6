"""The project's own merge of an adapter into plain weights: the reference where PEFT is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polylens.core import LayerKind
from polylens.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping

    from polylens.core import Delta, ModelLayers


def merged_weight(weight: torch.Tensor, delta: Delta, kind: LayerKind) -> torch.Tensor:
    """The weight that acts like `weight` with `delta` applied, in the dtype of `weight`.

    LINEAR, weight (out, in): W + scaling · B A. MATMUL, weight (in, out): W + scaling · (B A)ᵀ. Computed in
    float32 and rounded once.
    """
    update_oi = (delta.b.float() @ delta.a.float()) * delta.scaling
    if kind is LayerKind.MATMUL:
        update_oi = update_oi.T
    if update_oi.shape != weight.shape:
        raise InternalError(f"{delta.layer}: delta {tuple(update_oi.shape)} on weight {tuple(weight.shape)}")
    return (weight.float() + update_oi.to(weight.device)).to(weight.dtype)


def weight_key(layer: str, kind: LayerKind) -> str:
    """The name of a layer's weight in a state dict."""
    return layer if kind is LayerKind.MATMUL else f"{layer}.weight"


def merge_into(state: MutableMapping[str, torch.Tensor], deltas: Iterable[Delta], layers: ModelLayers) -> None:
    """Replace in `state` (as from `model.state_dict()`) the weight of every layer that has a delta.

    The tensors that were in `state` stay untouched; new ones take their place. A head tied to the embeddings
    shares one tensor with them: load the result into a model whose head is untied.
    """
    for delta in deltas:
        kind = layers.specs[delta.layer].kind
        key = weight_key(delta.layer, kind)
        state[key] = merged_weight(state[key], delta, kind)
