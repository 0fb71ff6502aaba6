"""The project's own merge of an adapter into plain weights: the reference where PEFT is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polylens.core import Delta, LayerKind, Replacement, ScaledDelta, TokenRows
from polylens.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping

    from polylens.core import Change, ModelLayers


def merged_weight(weight: torch.Tensor, delta: Delta, kind: LayerKind) -> torch.Tensor:
    """The weight that acts like `weight` with `delta` applied, in the dtype of `weight`.

    LINEAR, ROUTER, weight (out, in): W + scaling · B A, each output then scaled where the delta says so. CONV: the
    same over flattened patches. EXPERTS, weight (experts, out, in): the same for each expert. MATMUL, EMBEDDING,
    weight (in, out), and EXPERTS_IN_FIRST: W + scaling · (B A)ᵀ. Computed in float32 and rounded once.
    """
    update_oi = (delta.b.float() @ delta.a.float()) * delta.scaling
    if kind in (LayerKind.MATMUL, LayerKind.EMBEDDING, LayerKind.EXPERTS_IN_FIRST):
        update_oi = update_oi.mT
    if kind is LayerKind.CONV:
        update_oi = update_oi.reshape(weight.shape)
    if update_oi.shape != weight.shape:
        raise InternalError(f"{delta.layer}: delta {tuple(update_oi.shape)} on weight {tuple(weight.shape)}")
    merged = weight.float() + update_oi.to(weight.device)
    if isinstance(delta, ScaledDelta) and delta.scale_o is not None:
        scale_o = delta.scale_o.float().to(weight.device)
        out_last = kind in (LayerKind.MATMUL, LayerKind.EMBEDDING)
        merged *= scale_o if out_last else scale_o.view(-1, *[1] * (weight.dim() - 1))
    return merged.to(weight.dtype)


def merged_bias(bias: torch.Tensor | None, delta: ScaledDelta) -> torch.Tensor | None:
    """The bias of a layer with `delta` applied, in the dtype of `bias`; None where none is needed."""
    if bias is None:
        return None if delta.shift_o is None else delta.shift_o.clone()
    merged = bias.float()
    if delta.scale_o is not None:
        merged = merged * delta.scale_o.float().to(bias.device)
    if delta.shift_o is not None:
        merged = merged + delta.shift_o.float().to(bias.device)
    return merged.to(bias.dtype)


def merged_parameters(
    change: Change, kind: LayerKind, weight: torch.Tensor, bias: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """The parameters of one layer that differ once `change` is merged: "weight", "bias", or both."""
    if isinstance(change, Replacement):
        return {role: new.to(weight.device, weight.dtype) for role, new in change.tensors().items()}
    if isinstance(change, TokenRows):
        new = weight.clone()
        new[list(change.token_ids)] = change.rows_nd.to(weight.device, weight.dtype)
        return {"weight": new}
    new_bias = merged_bias(bias, change) if isinstance(change, ScaledDelta) else None
    return {"weight": merged_weight(weight, change, kind)} | ({} if new_bias is None else {"bias": new_bias})


def merge_into(state: MutableMapping[str, torch.Tensor], deltas: Iterable[Change], layers: ModelLayers) -> None:
    """Replace in `state` (as from `model.state_dict()`) the parameters of every layer that has a delta.

    The tensors that were in `state` stay untouched; new ones take their place. A head tied to the embeddings
    shares one tensor with them: load the result into a model whose head is untied.
    """
    for change in deltas:
        spec = layers.specs[change.layer]
        key, bias_key = spec.state_name(), f"{spec.name}.bias"
        merged = merged_parameters(change, spec.kind, state[key], state.get(bias_key))
        for role, tensor in merged.items():
            state[key if role == "weight" else bias_key] = tensor
