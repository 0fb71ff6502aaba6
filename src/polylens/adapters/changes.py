"""From fitted tensors to what is applied: the place where an adapter meets the base model's own values, once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from polylens.core import EXPERT_KINDS, Delta, LayerKind, Replacement, ScaledDelta, TokenRows
from polylens.errors import InternalError

if TYPE_CHECKING:
    from polylens.adapters.layer_fit import LayerFit
    from polylens.core import Change, LayerSpec, ModelLayers


def change_of(fit: LayerFit, layers: ModelLayers, dtype: torch.dtype) -> Change:
    """What `fit` does to its layer, in `dtype` on the CPU.

    Reads the base layer's parameters where the change depends on them (DoRA, biases), computes in float32 and
    rounds once.
    """
    if fit.token_rows is not None:
        return TokenRows(fit.spec.name, fit.token_ids, fit.token_rows.to(dtype))
    if not fit.rank:
        return Replacement(fit.spec.name, **{role: value.to(dtype) for role, value in fit.values.items()})
    if "weight" in fit.values:
        return _replaced_and_factored(fit, layers, dtype)
    a, b = (factor.to(dtype).contiguous() for factor in (fit.a, fit.b))
    if fit.magnitude is None and fit.lora_bias is None and not fit.values:
        return Delta(fit.spec.name, a, b, fit.scaling)
    scale_o = None if fit.magnitude is None else dora_scale(fit, _base(fit.spec, "weight", layers))
    shift_o = _shift(fit, scale_o, layers)
    cast = {name: x.to(dtype) for name, x in (("scale_o", scale_o), ("shift_o", shift_o)) if x is not None}
    return ScaledDelta(fit.spec.name, a, b, fit.scaling, **cast)


def dora_scale(fit: LayerFit, weight: torch.Tensor) -> torch.Tensor:
    """DoRA's factor of every output (arXiv 2402.09353, as PEFT has it): magnitude / ‖W + scaling · B A‖, (out,).

    The norm is over the inputs. It depends on nothing that a request brings, so it is computed once.
    """
    if fit.magnitude is None:
        raise InternalError(f"{fit.spec.name} has no magnitude")
    norm_o = torch.linalg.vector_norm(_merged(fit, weight), dim=1)
    return fit.magnitude.float() / norm_o


def _shift(fit: LayerFit, scale_o: torch.Tensor | None, layers: ModelLayers) -> torch.Tensor | None:
    """What is added to an output after scaling, (out,), so that its bias ends as the one trained.

    y_base holds the base bias, which DoRA does not scale: it is taken out and the new one put in.
    """
    bias = layers.parameters.get(fit.spec.state_name("bias"))
    old_o = None if bias is None else bias.float().cpu()
    new_o = fit.values["bias"].float() if "bias" in fit.values else old_o
    if fit.lora_bias is not None:
        added_o = fit.scaling * fit.lora_bias.float()
        new_o = added_o if new_o is None else new_o + added_o
    if new_o is None:
        return None
    if old_o is None:
        return new_o
    return new_o - (old_o if scale_o is None else scale_o * old_o)


def _replaced_and_factored(fit: LayerFit, layers: ModelLayers, dtype: torch.dtype) -> Replacement:
    """A new weight with factors on top: PEFT puts `base_layer.weight` of the file into the base layer."""
    value = fit.values["weight"]
    bare = replace(fit, values={role: x for role, x in fit.values.items() if role != "weight"})
    weight = _merged(fit, value)
    bias = layers.parameters.get(fit.spec.state_name("bias"))
    new_bias = bare.values.get("bias", None if bias is None else bias.cpu())
    if fit.magnitude is not None:
        weight = weight * dora_scale(fit, value)[:, None]
    if fit.lora_bias is not None:
        added_o = fit.scaling * fit.lora_bias.float()
        new_bias = added_o if new_bias is None else new_bias.float() + added_o
    if fit.spec.kind in (LayerKind.MATMUL, LayerKind.EMBEDDING, LayerKind.EXPERTS_IN_FIRST):
        weight = weight.mT
    weight = weight.reshape(value.shape).to(dtype).contiguous()
    return Replacement(fit.spec.name, weight, None if new_bias is None else new_bias.to(dtype))


def _merged(fit: LayerFit, weight: torch.Tensor) -> torch.Tensor:
    """W + scaling · B A as (out, inputs), of experts with the expert first, in float32 on the CPU."""
    w_oi = weight.detach().cpu().float()
    if fit.spec.kind in EXPERT_KINDS:
        w_oi = w_oi.mT if fit.spec.kind is LayerKind.EXPERTS_IN_FIRST else w_oi
        return torch.baddbmm(w_oi, fit.b.float(), fit.a.float(), alpha=fit.scaling)
    w_oi = w_oi.T if fit.spec.kind in (LayerKind.MATMUL, LayerKind.EMBEDDING) else w_oi.flatten(1)
    return torch.addmm(w_oi, fit.b.float(), fit.a.float(), alpha=fit.scaling)


def _base(spec: LayerSpec, role: str, layers: ModelLayers) -> torch.Tensor:
    value = layers.parameters.get(spec.state_name(role))
    if value is None or value.is_meta:
        raise InternalError(f"the {role} of {spec.name} is not at hand")
    return value
