"""The layers of a model that adapters may change, as names and shapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch


class Component(StrEnum):
    """The part of a vision-language model a layer belongs to."""

    VISION_TOWER = "vision_tower"
    CONNECTOR = "connector"
    LANGUAGE_MODEL = "language_model"


class LayerKind(StrEnum):
    """How a layer computes; decides which adapter tensors fit it."""

    LINEAR = "linear"
    """An `nn.Linear`: weight (out, in), y = x Wᵀ + b."""
    MATMUL = "matmul"
    """A bare 2-D `nn.Parameter` (in, out) used as y = x W (Gemma 3's projector)."""
    CONV = "conv"
    """A patch embedding: an `nn.Conv2d` or `nn.Conv3d` whose stride is its kernel, so a linear layer over patches.

    in_features: values of one patch. One row is one leading index of its input: a patch, or a whole tile."""
    NORM = "norm"
    """A norm with a weight (width,) and perhaps a bias; each row by itself."""
    HEAD_NORM = "head_norm"
    """A norm of another width inside the text model (of queries and keys, head by head); rows are tokens."""
    EMBEDDING = "embedding"
    """The token embedding (in_features: the vocabulary); rows are token ids."""
    EXPERTS = "experts"
    """One bare 3-D `nn.Parameter` (experts, out, in) of a mixture: rows are tokens, each seen by its own experts."""
    EXPERTS_IN_FIRST = "experts_in_first"
    """The same, stored (experts, in, out) and used as y = x W (Aria, Llama 4)."""
    ROUTER = "router"
    """What chooses a token's experts: a weight (experts, width) in a module that is no plain `nn.Linear`."""

    SHARED = "shared"
    """Any other parameter of the tower, of which all items of a batch share the values (position embeddings)."""


FACTOR_KINDS = frozenset(LayerKind) - {LayerKind.NORM, LayerKind.HEAD_NORM, LayerKind.SHARED}
"""Kinds of layer that take factors A and B; others can only be replaced."""

EXPERT_KINDS = frozenset({LayerKind.EXPERTS, LayerKind.EXPERTS_IN_FIRST})
"""Kinds of layer that hold one weight for each expert."""

BARE_KINDS = frozenset({LayerKind.MATMUL, LayerKind.SHARED}) | EXPERT_KINDS
"""Kinds of layer that are a parameter of a module themselves."""


@dataclass(frozen=True)
class LayerSpec:
    """One adaptable layer of the loaded model.

    `name` is the module path, as in `model.named_modules()` (for `BARE_KINDS`: path of the parameter).
    num_experts: of EXPERT_KINDS, whose features are those of one expert.
    """

    name: str
    component: Component
    kind: LayerKind
    in_features: int
    out_features: int
    num_experts: int = 1

    @property
    def module(self) -> str:
        """Path of the module that has the weight: the layer itself, or what owns a layer that is a parameter."""
        return self.name.rpartition(".")[0] if self.kind in BARE_KINDS else self.name

    @property
    def parameter(self) -> str:
        """The weight's name in its module."""
        return self.name.rpartition(".")[2] if self.kind in BARE_KINDS else "weight"

    def state_name(self, role: str = "weight") -> str:
        """The name of its weight or bias in the model's state."""
        return self.name if self.kind in BARE_KINDS else f"{self.name}.{role}"


@dataclass(frozen=True)
class ModelLayers:
    """What adapters need to know of a loaded model: names and shapes, no modules.

    `rename` maps a module path as written by any transformers 4.4x/5.x to this model's path
    (unchanged when no rule applies). `model_type` and `model_class` are for messages.
    `other_modules` are module paths that exist but cannot take a delta: used to say *why* a tensor does not fit.
    `parameters` are the base model's own tensors by name (on the meta device where only a config was read):
    what DoRA's norms and new biases are computed against. `source`: where the model was loaded from, if known.
    `more_tokens`: whether an adapter may bring embeddings and head of more tokens than the model has.
    """

    specs: Mapping[str, LayerSpec]
    rename: Callable[[str], str]
    model_type: str
    model_class: str
    num_text_layers: int
    other_modules: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    source: str = ""
    more_tokens: bool = False
