"""Row rules of vLLM's encoder, probed through its own encoder call."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from polylens.core import Component, LayerKind, LayerSpec
from polylens.hosts.vllm.items import are_equal_in_size, create_processor, encode, modalities_of, synthetic_batches
from polylens.hosts.vllm.proof import run_alone
from polylens.hosts.vllm.seams import vllm_version
from polylens.models.probe import ProbeResult, probe_row_rules
from polylens.models.probe_cache import ProbeCache
from polylens.models.probe_hooks import ProbeLayer
from polylens.models.probe_model import architecture
from polylens.models.row_rules import RowRule

if TYPE_CHECKING:
    from vllm.config import ModelConfig

    from polylens.hosts.vllm.placement import Place

logger = logging.getLogger(__name__)

VERSION = 2
"""Raise whenever a probe here may find another result for the same model, as other items or another call may."""

GAIN_ROWS = 16
"""Random rows by which a layer's size is measured."""


@dataclass(frozen=True)
class EncoderRules:
    """rules: by an adapter's layer. mixed: modalities of which one encoder call may hold items of several adapters.
    out_of_reach: layers that the encoder call does not run, so that a delta on them could not be applied."""

    rules: Mapping[str, RowRule]
    mixed: frozenset[str]
    out_of_reach: frozenset[str]


@dataclass(frozen=True, eq=False)
class _PackedLayer(ProbeLayer):
    """A module of vLLM's, whose weight is packed away: its size is measured by its output."""

    measured_gain: float
    example: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:
        """Without values: the dtype and device are what the probe needs of it."""
        return self.example

    @property
    def gain(self) -> float:
        return self.measured_gain

    @property
    def is_sealed(self) -> bool:
        return True


def find_encoder_rules(
    model: nn.Module,
    model_config: ModelConfig,
    specs: Mapping[str, LayerSpec],
    places: Mapping[str, Place],
    device: torch.device,
) -> EncoderRules:
    """Probe the placed layers of tower and connector, module by module. Where it fails, nothing may be mixed."""
    of_text = Component.LANGUAGE_MODEL
    of_encoder = {name: place for name, place in places.items() if specs[name].component is not of_text}
    if not of_encoder:
        return EncoderRules({}, frozenset(), frozenset())
    processor = create_processor(model_config)
    modalities = modalities_of(processor)
    result = _known_or_probed(model, model_config, processor, specs, of_encoder, device)
    if result is None:
        return EncoderRules(dict.fromkeys(of_encoder, RowRule.UNPROVEN), frozenset(), frozenset())
    rules = {name: result.rules[place.path] for name, place in of_encoder.items()}
    unreached = frozenset(name for name, place in of_encoder.items() if place.path in result.unreachable)
    unproven = [name for name, rule in rules.items() if rule is RowRule.UNPROVEN and name not in unreached]
    if unproven:
        reason = result.reasons.get(of_encoder[unproven[0]].path, "")
        logger.warning(
            "%d encoder layers have no proven row rule, e.g. %s (%s): the encoder runs one adapter at a time",
            len(unproven),
            unproven[0],
            reason,
        )
    return EncoderRules(rules, frozenset() if unproven else frozenset(modalities), unreached)


def _probe_layers(
    model: nn.Module, specs: Mapping[str, LayerSpec], places: Mapping[str, Place]
) -> Sequence[ProbeLayer]:
    """One a module: the layers packed in it see the same rows."""
    layers: dict[str, ProbeLayer] = {}
    for name, place in places.items():
        if place.path not in layers:
            layers[place.path] = _probe_layer(model, specs[name], place.path)
    return tuple(layers.values())


def _probe_layer(model: nn.Module, spec: LayerSpec, path: str) -> ProbeLayer:
    if spec.kind is LayerKind.MATMUL:
        named = LayerSpec(path, spec.component, spec.kind, spec.in_features, spec.out_features)
        return ProbeLayer(named, model.get_submodule(path.rpartition(".")[0]))
    module = model.get_submodule(path)
    if spec.kind is not LayerKind.LINEAR:
        named = LayerSpec(path, spec.component, spec.kind, spec.in_features, spec.out_features)
        return ProbeLayer(named, module)
    x_ti = torch.randn(GAIN_ROWS, spec.in_features, generator=torch.Generator().manual_seed(0))
    y_to = run_alone(module, x_ti)
    zero_to = run_alone(module, torch.zeros_like(x_ti))
    gain = (y_to - zero_to).float().square().mean().sqrt().item()
    named = LayerSpec(path, spec.component, spec.kind, spec.in_features, y_to.shape[1])
    return _PackedLayer(named, module, gain, y_to.new_empty(0))


def _known_or_probed(
    model: nn.Module,
    model_config: ModelConfig,
    processor: Any,
    specs: Mapping[str, LayerSpec],
    places: Mapping[str, Place],
    device: torch.device,
) -> ProbeResult | None:
    """From an earlier start of the same model, or measured now and kept; None where the probe fails.

    How rows divide does not depend on their type, and is best seen without rounding: what was proven in float32 holds.
    """
    cache = ProbeCache()
    facts = _facts(model, model_config, processor, device)
    paths = {place.path for place in places.values()}
    for dtype in ("torch.float32", facts["dtype"]):
        known = cache.load({**facts, "dtype": dtype}, paths)
        if known is not None:
            return known
    with torch.inference_mode():
        result = _probe_or_give_up(model, processor, _probe_layers(model, specs, places), device)
    if result is not None:
        cache.store(facts, result)
    return result


def _facts(model: nn.Module, model_config: ModelConfig, processor: Any, device: torch.device) -> dict[str, Any]:
    """What a result depends on, besides the probe itself. Processors that are vLLM's own follow from the config."""
    hf_processor = processor.info.get_hf_processor()
    parts: dict[str, Any] = {n: getattr(hf_processor, n, None) for n in ("image_processor", "video_processor")}
    multimodal = model_config.multimodal_config
    return {
        "host": f"vllm {vllm_version()}, {VERSION}",
        "config": architecture(model_config.hf_config.to_dict()),
        "class": type(model).__qualname__,
        "transformers": transformers.__version__,
        "attention": str(getattr(multimodal, "mm_encoder_attn_backend", None)),
        "dtype": str(model_config.dtype),
        "device": device.type,
        "modalities": modalities_of(processor),
        "options": getattr(multimodal, "mm_processor_kwargs", None),
        "processors": {name: part.to_dict() for name, part in parts.items() if hasattr(part, "to_dict")},
    }


def _probe_or_give_up(
    model: nn.Module, processor: Any, layers: Sequence[ProbeLayer], device: torch.device
) -> ProbeResult | None:
    """The probe runs other people's code on noise. Where that fails nothing is known: slower, and never wrong."""
    try:
        batches = synthetic_batches(processor)
        equal = all(are_equal_in_size(batch) for batch in batches.values())
        return probe_row_rules(
            lambda items: encode(model, items, device),
            list(batches.values()),
            layers,
            # All items alike in size: any rule divides rightly, and the one that names the layout is tested.
            declared={"": RowRule.IMAGES} if equal else None,
        )
    except Exception as error:
        logger.warning(
            "row rules could not be probed (%s: %s): the encoder runs one adapter at a time",
            type(error).__name__,
            error,
            exc_info=logger.isEnabledFor(logging.DEBUG),
        )
        return None
