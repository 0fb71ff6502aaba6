"""What polylens makes of a base model: how it is run, what adapters may change, what is refused."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from polylens.core import EXPERT_KINDS, Component, LayerKind
from polylens.engine.adaptable import Adaptable
from polylens.engine.prove import settled
from polylens.models.loading import auto_class, load_processor, loading_errors, prepare_model, read_config
from polylens.models.parts import audio_path
from polylens.models.probe_model import find_row_rules
from polylens.models.row_rules import RowRule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polylens.models.loading import LoadedModel
    from polylens.models.probe import ProbeResult

NOT_DIVIDED = frozenset({RowRule.NO_EFFECT, RowRule.UNPROVEN})


@dataclass(frozen=True)
class ComponentDescription:
    """num_layers: by kind. row_rules: how their rows divide among the pictures of a batch (of the encoder only)."""

    num_layers: Mapping[str, int]
    row_rules: tuple[str, ...]


@dataclass(frozen=True)
class ModelDescription:
    """level: "mixed", "one adapter at a time in the encoder" or "host path", the last with its reason. no_effect:
    layers that load but change nothing. refused: layers by name, with the reason."""

    model: str
    model_type: str
    model_class: str
    num_parameters: int
    level: str
    reason: str | None
    takes_media: bool
    takes_pictures: bool
    takes_videos: bool
    components: Mapping[str, ComponentDescription]
    no_effect: tuple[str, ...]
    refused: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def describe_model(source: str, *, trust_remote_code: bool = False) -> ModelDescription:
    """Describe a model from its config and processor files alone. Raises ModelLoadError."""
    config = read_config(source, trust_remote_code=trust_remote_code)
    with loading_errors(source):
        processor = load_processor(source, config, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
        limit = getattr(config.get_text_config(), "max_position_embeddings", None) or 1
        loaded = settled(prepare_model(model, processor, source=source, max_model_len=limit))
    return description(loaded, find_row_rules(loaded))


def description(loaded: LoadedModel, probe: ProbeResult) -> ModelDescription:
    """Describe a loaded model with the row rules that were found for it."""
    adaptable = Adaptable.of(loaded.layers, probe)
    mixed = "mixed" if adaptable.mixed else "one adapter at a time in the encoder"
    return ModelDescription(
        model=loaded.source,
        model_type=loaded.layers.model_type,
        model_class=loaded.layers.model_class,
        num_parameters=sum(p.numel() for p in loaded.model.parameters()),
        level="host path" if loaded.is_hosted else mixed,
        reason=loaded.host_reason,
        takes_media=loaded.processing.takes_media,
        takes_pictures=loaded.processing.takes_pictures,
        takes_videos=loaded.processing.takes_videos,
        components={part.value: _component(part, adaptable, probe, audio_path(loaded.model)) for part in Component},
        no_effect=tuple(sorted(probe.layers_with(RowRule.NO_EFFECT))),
        refused=adaptable.refused,
    )


def _component(part: Component, adaptable: Adaptable, probe: ProbeResult, audio: str | None) -> ComponentDescription:
    """Without an encoder of sounds, which is no part of what is served."""
    specs = [spec for spec in adaptable.specs.values() if spec.component is part]
    own = [spec for spec in specs if audio is None or not spec.name.startswith(f"{audio}.")]
    rules = {probe.rules[spec.name] for spec in own if spec.name in probe.rules} - NOT_DIVIDED
    kinds = Counter((LayerKind.EXPERTS if spec.kind in EXPERT_KINDS else spec.kind).value for spec in own)
    return ComponentDescription(dict(sorted(kinds.items())), tuple(sorted(rule.value for rule in rules)))
