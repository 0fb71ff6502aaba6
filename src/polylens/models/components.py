"""Which layer of a loaded model belongs to which component, and under which names adapters may know it."""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import TYPE_CHECKING

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from polylens.core import EXPERT_KINDS, Component, LayerKind, LayerSpec, ModelLayers
from polylens.models.families import llama4, notes_for
from polylens.models.parts import module_path, output_head, picture_encoder, text_encoder, text_model, token_embedding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel

    Locate = Callable[[str], Component]
    """The component of a module or parameter path."""

# A merger inside the tower module is the connector: it maps patches to the text model's width
# (Qwen-VL: visual.merger, visual.deepstack_merger_list; GLM-4V: visual.downsample; Ovis 2: head_linear; Granite
# Docling: connector).
_CONNECTOR_IN_TOWER = re.compile(
    r"^(?:\w+_)?(?:merger|merger_list|downsample|head_linear|head_norm|connector|multi_modal_projector)(?:\.|$)"
)
_SECOND_TOWER = re.compile(r"(?:^|\.)(?:video_tower|high_res_vision_(?:model|neck|proj))\.")
"""Towers that transformers does not name as the encoder: Video-LLaVA's of videos, DeepSeek-VL's of large pictures."""
_OWNED = EXPERT_KINDS | {LayerKind.SHARED}
"""Kinds of which all parameters of the owning module are layers."""


def model_layers(model: PreTrainedModel) -> ModelLayers:
    """Find every layer of `model` an adapter may change.

    Linear layers, patch embeddings, norms and the token embedding are found by type, bare parameters by the
    family's notes. Everything else that has parameters is listed in `other_modules`, so that a refusal can say
    what a tensor's module is.
    """
    locate = _component_finder(model)
    found = {spec.name: spec for spec in _layer_specs(model, locate)}
    refused = {name: reason for name in found if (reason := _not_adaptable(name, model))}
    specs = {name: spec for name, spec in found.items() if name not in refused}
    owners = {spec.module for spec in specs.values() if spec.kind in _OWNED}
    others = {
        name: type(module).__name__
        for name, module in model.named_modules()
        if name not in specs and name not in owners and next(module.parameters(recurse=False), None) is not None
    }
    others |= {found[name].module: reason for name, reason in refused.items()}
    return ModelLayers(
        specs=specs,
        rename=renamer(model),
        model_type=model.config.model_type,
        model_class=type(model).__name__,
        num_text_layers=model.config.get_text_config().num_hidden_layers,
        other_modules=others,
        parameters=dict(model.named_parameters(remove_duplicate=False)),
        source=model.config._name_or_path or "",
        more_tokens=_has_one_table(model),
    )


def _has_one_table(model: PreTrainedModel) -> bool:
    """Whether the text model looks tokens up in its embedding alone (Gemma 4 has a second table of them)."""
    tables = [module for module in text_model(model).modules() if isinstance(module, nn.Embedding)]
    return tables == [token_embedding(model)]


def _not_adaptable(layer: str, model: PreTrainedModel) -> str | None:
    patterns = notes_for(model.config.model_type).not_adaptable
    return next((reason for pattern, reason in patterns.items() if re.search(pattern, layer)), None)


def _layer_specs(model: PreTrainedModel, locate: Locate) -> Iterator[LayerSpec]:
    for name, module in model.named_modules():
        if spec := _module_spec(name, module, model, locate):
            yield spec
        elif (kind := experts_kind(module)) and locate(name) is Component.LANGUAGE_MODEL:
            yield from _expert_specs(name, module, kind)
        else:
            yield from _parameter_specs(name, module, model, locate)


def _module_spec(name: str, module: nn.Module, model: PreTrainedModel, locate: Locate) -> LayerSpec | None:
    """The spec of a module that is one layer; None for any other module."""
    component = locate(name)
    of_text = component is Component.LANGUAGE_MODEL
    if of_text and is_router(module):
        num_experts, width = module.get_parameter("weight").shape
        return LayerSpec(name, component, LayerKind.ROUTER, width, num_experts)
    if isinstance(module, nn.Linear):
        # Inkling's are tensors.
        return LayerSpec(name, component, LayerKind.LINEAR, int(module.in_features), int(module.out_features))
    if (weight := module._parameters.get("weight")) is None:
        return None
    if module is token_embedding(model) and isinstance(module, nn.Embedding):
        width = module.embedding_dim
        return LayerSpec(name, Component.LANGUAGE_MODEL, LayerKind.EMBEDDING, module.num_embeddings, width)
    if isinstance(module, nn.Conv2d | nn.Conv3d) and _is_linear_over_patches(module):
        return LayerSpec(name, component, LayerKind.CONV, weight[0].numel(), weight.shape[0])
    if weight.dim() == 1 and type(module).__name__.endswith("Norm") and _takes_rows(module):
        inner = of_text and len(weight) != model.config.get_text_config().hidden_size
        kind = LayerKind.HEAD_NORM if inner else LayerKind.NORM
        return LayerSpec(name, component, kind, len(weight), len(weight))
    return None


def _expert_specs(name: str, module: nn.Module, kind: LayerKind) -> Iterator[LayerSpec]:
    for parameter in EXPERT_PARAMETERS:
        num_experts, out, inputs = module.get_parameter(parameter).shape
        if kind is LayerKind.EXPERTS_IN_FIRST:
            out, inputs = inputs, out
        yield LayerSpec(f"{name}.{parameter}", Component.LANGUAGE_MODEL, kind, inputs, out, num_experts)


def _parameter_specs(name: str, module: nn.Module, model: PreTrainedModel, locate: Locate) -> Iterator[LayerSpec]:
    """Of parameters that are layers themselves: those multiplied with, and all others of the tower."""
    matmul_parameters = notes_for(model.config.model_type).matmul_parameters
    for own_name, parameter in module.named_parameters(recurse=False):
        path = f"{name}.{own_name}"
        if own_name in matmul_parameters:
            yield LayerSpec(path, locate(path), LayerKind.MATMUL, parameter.shape[0], parameter.shape[1])
        elif locate(name) is Component.VISION_TOWER and parameter.dim():
            # The tower runs nowhere but in the encoder, so there its parameters can be exchanged as a whole.
            width = parameter.shape[-1]
            yield LayerSpec(path, Component.VISION_TOWER, LayerKind.SHARED, parameter.numel() // width, width)


def _takes_rows(module: nn.Module) -> bool:
    """Whether a norm is one of vectors, given as one tensor."""
    return not isinstance(module, nn.GroupNorm) and len(inspect.signature(type(module).forward).parameters) == 2


EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
"""Of transformers' experts: y = down (act(gate x) * up x), gate and up in one tensor, experts first."""

_ROUTER_NAME = re.compile(r"(?:Router|Gate)$")


def experts_kind(module: nn.Module) -> LayerKind | None:
    """How the module holds a mixture's experts: one weight for all in each of EXPERT_PARAMETERS, and no biases.

    None where it holds none, and where it has biases or norms between: those are left to `other_modules`.
    """
    own = module._parameters
    three = [weight for name in EXPERT_PARAMETERS if (weight := own.get(name)) is not None and weight.dim() == 3]
    if len(three) != len(own) or len(own) != len(EXPERT_PARAMETERS):
        return None
    if llama4.are_experts(module):
        return LayerKind.EXPERTS_IN_FIRST
    takes = list(inspect.signature(type(module).forward).parameters)[1:]
    plain = not any(getattr(module, flag, False) for flag in ("has_bias", "has_post_expert_norm"))
    if takes != ["hidden_states", "top_k_index", "top_k_weights"] or not plain or not getattr(module, "has_gate", True):
        return None
    return LayerKind.EXPERTS_IN_FIRST if getattr(module, "is_transposed", False) else LayerKind.EXPERTS


def is_router(module: nn.Module) -> bool:
    """Whether the module scores and chooses experts by one weight (experts, width): transformers names them so."""
    weight = module._parameters.get("weight")
    return bool(_ROUTER_NAME.search(type(module).__name__)) and weight is not None and weight.dim() == 2


def _is_linear_over_patches(module: nn.Conv2d | nn.Conv3d) -> bool:
    """Whether the convolution's patches do not overlap, so that it is a linear layer on each of them."""
    plain = module.groups == 1 and not any(module.output_padding) and set(module.dilation) == {1}
    unpadded = module.padding == "valid" or not any(module.padding)
    return plain and unpadded and tuple(module.stride) == tuple(module.kernel_size)


def _component_finder(model: PreTrainedModel) -> Locate:
    tower = module_path(model, picture_encoder(model))
    text = module_path(model, text_model(model))
    encoder = text_encoder(model)
    texts = (f"{text}.", f"{text if encoder is None else module_path(model, encoder)}.")
    head = module_path(model, output_head(model))

    tower_in_text = tower.startswith(f"{text}.")

    def locate(name: str) -> Component:
        if tower_in_text and name.startswith(f"{tower}."):
            return Component.VISION_TOWER
        if name == head or name.startswith(texts):
            return Component.LANGUAGE_MODEL
        if _SECOND_TOWER.search(name):
            return Component.VISION_TOWER
        if name.startswith(f"{tower}.") and not _CONNECTOR_IN_TOWER.match(name.removeprefix(f"{tower}.")):
            return Component.VISION_TOWER
        return Component.CONNECTOR

    return locate


def renamer(model: PreTrainedModel) -> Callable[[str], str]:
    """transformers' own checkpoint renaming, applied to a module path.

    The tables are those `from_pretrained` uses for old checkpoints (`transformers.conversion_mapping`);
    they work on parameter names, so a `.weight` is added and taken off again.
    """
    transforms = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    names = dict.fromkeys(model.state_dict())
    prefix = model.base_model_prefix

    @cache
    def rename(path: str) -> str:
        new, _ = rename_source_key(f"{path}.weight", renamings, converters, prefix, names)
        return new.removesuffix(".weight")

    return rename
