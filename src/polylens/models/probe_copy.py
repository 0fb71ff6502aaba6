"""A small stand-in for a model's encoder, and how row rules found on it carry over.

Row rules follow from the architecture, not from the weights. So the probe runs on a float32 copy made from the
config alone, with random weights that let every layer be seen, and without a text model to speak of, and with
few blocks where the tower is big (`probe_cut`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from polylens.core import Component, LayerKind, ModelLayers
from polylens.models.components import model_layers
from polylens.models.parts import audio_path
from polylens.models.probe import ProbeResult
from polylens.models.probe_cut import cut_tower
from polylens.models.probe_hooks import ProbeLayer
from polylens.models.row_rules import RowRule

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MAX_UNCUT_PARAMETERS = 20_000_000
"""Encoders up to this size are probed whole: a few dozen forwards of one take seconds on two cores."""

_SMALL_TEXT = {
    "vocab_size": 8,
    "intermediate_size": 8,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
}
_FEW_EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "top_k_experts": 1}
_AUDIO_DEPTHS = ("encoder_layers", "num_hidden_layers")
_WEIGHT_GAIN = 1.2
_NOISE_OF_VECTORS = 0.1


@dataclass(frozen=True, eq=False)
class ProbeCopy:
    """The stand-in. `kept`: which blocks of the full tower its blocks stand for (None: all of them)."""

    model: PreTrainedModel
    layers: ModelLayers
    kept: tuple[int, ...] | None


def copy_for_probe(
    model: PreTrainedModel, layers: ModelLayers, *, max_parameters: int = MAX_UNCUT_PARAMETERS
) -> ProbeCopy:
    """Make the stand-in for `model`, on its device. `max_parameters`: encoders beyond it are cut."""
    config = copy.deepcopy(model.config)
    _shrink_text(config.get_text_config())
    list_lengths = {len(module) for module in model.modules() if isinstance(module, nn.ModuleList)}
    is_big = _encoder_parameters(layers) > max_parameters
    kept = cut_tower(config, list_lengths) if is_big else None
    if is_big:
        _cut_sounds(config)
    config._attn_implementation = _tower_attention(model)
    config.get_text_config()._attn_implementation = None  # its default: it may have no other (Gemma 2)
    small, small_layers = random_model(model, config)
    return ProbeCopy(small, small_layers, kept)


def random_model(
    model: PreTrainedModel, config: PreTrainedConfig, **options: Any
) -> tuple[PreTrainedModel, ModelLayers]:
    """A float32 model of `config`, of the class and on the device of `model`: its weights are random, let every layer
    matter, and are the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # of the values that `_randomise` only adds to, such as decays
        small = type(model)._from_config(config, dtype=torch.float32, **options)
    small = small.to(_device_for_copy(model)).eval().requires_grad_(False)
    layers = model_layers(small)
    _randomise(small, layers)
    return small, layers


def _device_for_copy(model: nn.Module) -> torch.device:
    """The model's own device; of a model without weights, the CPU."""
    device = next(model.parameters()).device
    return torch.device("cpu") if device.type == "meta" else device


def probe_layers(model: nn.Module, layers: ModelLayers) -> list[ProbeLayer]:
    """The adaptable layers of tower and connector, with their modules."""
    modules = dict(model.named_modules())
    specs = (layers.specs[name] for name in encoder_layers(layers))
    return [ProbeLayer(spec, modules[spec.module]) for spec in specs]


def encoder_layers(layers: ModelLayers) -> tuple[str, ...]:
    """Names of the adaptable layers outside the language model, those with rows of items."""
    return tuple(
        name
        for name, spec in layers.specs.items()
        if spec.component is not Component.LANGUAGE_MODEL and spec.kind is not LayerKind.SHARED
    )


def _encoder_parameters(layers: ModelLayers) -> int:
    specs = [layers.specs[name] for name in encoder_layers(layers)]
    return sum(spec.in_features * spec.out_features for spec in specs if spec.kind is not LayerKind.NORM)


def _tower_attention(model: PreTrainedModel) -> str:
    """The tower's attention; sdpa for kernels that take no float32."""
    name = model.get_encoder(modality="image").config._attn_implementation
    return name if name in ("sdpa", "eager") else "sdpa"


def _shrink_text(text: PreTrainedConfig) -> None:
    """The text model is never run: only its width matters, which the connector maps to."""
    for name, value in {**_SMALL_TEXT, **_FEW_EXPERTS}.items():
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, value)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    text.pad_token_id = 0  # within the few tokens that are left; not every config takes None


def _cut_sounds(config: PreTrainedConfig) -> None:
    """One layer stands for all of an encoder of sounds: the probe only asks whether pictures pass it."""
    audio = getattr(config, "audio_config", None)
    for name in _AUDIO_DEPTHS:
        if isinstance(getattr(audio, name, None), int):
            setattr(audio, name, 1)


def _randomise(model: nn.Module, layers: ModelLayers) -> None:
    """Random weights that keep activations in range and let every layer matter.

    The architectures' own initialisation does not: it holds zeros (Gemma 3's projector) and tiny scales.
    """
    generator = torch.Generator().manual_seed(0)
    matmul = {name for name in encoder_layers(layers) if layers.specs[name].kind is LayerKind.MATMUL}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        if parameter.dim() < 2:
            parameter.add_(noise * _NOISE_OF_VECTORS)
            continue
        if parameter.numel() == 0:  # of a text model that was shrunk
            continue
        fan_in = parameter.shape[0] if name in matmul else _fan_in(parameter)
        parameter.copy_(noise * (_WEIGHT_GAIN / fan_in**0.5))


def _fan_in(weight: torch.Tensor) -> float:
    """Inputs of one output. Of experts, (experts, in, out) or (experts, out, in), it is not known which is which."""
    is_experts = weight.dim() == 3 and weight.shape[1] > 1
    return weight[0].numel() ** 0.5 if is_experts else weight[0].numel()


def carry_over(names: Iterable[str], result: ProbeResult, model: nn.Module, probed: ProbeCopy) -> ProbeResult:
    """The result for the full model's layers `names`, from the result for its stand-in.

    A layer outside the cut blocks and a layer of a kept block have the rule of the layer they became. Other
    blocks take the one rule on which the same layer of all kept blocks agrees; UNPROVEN where they do not.
    A block without effect counts as agreeing, and a block between two such has no effect either. An encoder of sounds
    is one block.
    """
    names = list(names)
    if probed.kept is None:
        rules = {name: result.rules.get(name, RowRule.UNPROVEN) for name in names}
    else:
        prefixes = _block_lists(model, probed)
        rules = {name: _carried(name, result.rules, prefixes, probed.kept) for name in names}
    rules |= _rules_of_sounds(names, result.rules, audio_path(probed.model))
    unproven = (name for name, rule in rules.items() if rule is RowRule.UNPROVEN)
    reasons = {name: result.reasons.get(name, "its rule on the cut copy does not carry over") for name in unproven}
    return replace(result, rules=rules, reasons=reasons)


def _rules_of_sounds(names: Iterable[str], found: Mapping[str, RowRule], audio: str | None) -> dict[str, RowRule]:
    """No effect for all layers of the encoder of sounds, if those probed have none."""
    if audio is None or {rule for name, rule in found.items() if name.startswith(f"{audio}.")} != {RowRule.NO_EFFECT}:
        return {}
    return {name: RowRule.NO_EFFECT for name in names if name.startswith(f"{audio}.")}


def _block_lists(model: nn.Module, probed: ProbeCopy) -> tuple[str, ...]:
    """Paths of the module lists that were cut: longer in the full model than in the stand-in."""
    lengths = {name: len(m) for name, m in probed.model.named_modules() if isinstance(m, nn.ModuleList)}
    kept = probed.kept or ()
    return tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and lengths.get(name) == len(kept) < len(module) > kept[-1]
    )


def _carried(name: str, found: Mapping[str, RowRule], prefixes: Iterable[str], kept: tuple[int, ...]) -> RowRule:
    prefix = next((prefix for prefix in prefixes if name.startswith(f"{prefix}.")), None)
    if prefix is None:
        return found.get(name, RowRule.UNPROVEN)
    number, _, rest = name.removeprefix(f"{prefix}.").partition(".")
    rules = {full: found.get(f"{prefix}.{cut}.{rest}") for cut, full in enumerate(kept)}
    return rule_of_block(int(number), {full: rule for full, rule in rules.items() if rule is not None})


def rule_of_block(number: int, rules: Mapping[int, RowRule]) -> RowRule:
    """The rule of one layer in block `number`, given its rules in the kept blocks."""
    if number in rules:
        return rules[number]
    real = set(rules.values()) - {RowRule.NO_EFFECT}
    if not rules or len(real) > 1:
        return RowRule.UNPROVEN
    if not real:
        return RowRule.NO_EFFECT
    below = rules[max((full for full in rules if full < number), default=min(rules))]
    above = rules[min((full for full in rules if full > number), default=max(rules))]
    return RowRule.NO_EFFECT if {below, above} == {RowRule.NO_EFFECT} else real.pop()
