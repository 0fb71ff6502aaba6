"""The base model as adapters know it: its layers under transformers' names, with the values of its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from polylens.hosts.vllm.checkpoint import Checkpoint, StoredParameters
from polylens.models.outline import outline_model

if TYPE_CHECKING:
    from polylens.core import ModelLayers


@dataclass(frozen=True, eq=False)
class BaseModel:
    """layers: of transformers' model, outlined from its config. checkpoint: the files of its weights."""

    layers: ModelLayers
    checkpoint: Checkpoint


def read_base(model_config: Any) -> BaseModel:
    """The base model of a vLLM `ModelConfig`. Raises ModelLoadError for one that polylens does not know."""
    source = str(model_config.model)
    layers = outline_model(source, trust_remote_code=model_config.trust_remote_code)
    checkpoint = Checkpoint(source, layers.rename)
    return BaseModel(replace(layers, parameters=StoredParameters(layers.parameters, checkpoint)), checkpoint)
