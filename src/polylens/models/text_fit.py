"""Whether a model's text part fits the engine's ragged batches, as far as it is told by what the model is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polylens.models.families import FAMILIES, notes_for
from polylens.models.parts import text_model
from polylens.models.recurrent import attends_and_carries_state

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_ROPE_BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Rotary positions that transformers computes from the longest sequence of a batch."""


def why_hosted(model: PreTrainedModel) -> str | None:
    """The reason why transformers' own generation must run the model; None if the ragged batch may be tried."""
    text: Any = model.config.get_text_config()
    if model.config.is_encoder_decoder or text.is_encoder_decoder:
        return "it is an encoder-decoder"
    if any(type(module).__name__.endswith("Indexer") for module in text_model(model).modules()):
        return "its text model chooses which earlier tokens each one sees (sparse attention)"
    if any(_is_cross_attention(name, module) for name, module in text_model(model).named_modules()):
        return "its text model attends to pictures in layers of its own (cross-attention)"
    if any(map(attends_and_carries_state, getattr(text, "layer_types", None) or ())):
        return "its text layers both attend and carry a state"
    if by_length := _rope_types(text_model(model)) & _ROPE_BY_LENGTH:
        return f"its rotary positions ({min(by_length)}) depend on the other sequences of a batch"
    return notes_for(model.config.model_type).hosted


def _is_cross_attention(name: str, module: Any) -> bool:
    return "CrossAttention" in type(module).__name__ or name.endswith(("crossattention", "cross_attn", "encoder_attn"))


def _rope_types(text: nn.Module) -> set[str]:
    """As the modules have it, which may know better than the config (HunyuanVL's `dynamic` with an alpha is fixed)."""
    kinds = [getattr(module, "rope_type", None) for module in text.modules()]
    named = [name for kind in kinds for name in (kind.values() if isinstance(kind, dict) else [kind])]
    return {name for name in named if isinstance(name, str)}


def is_proven_by_tests(model: PreTrainedModel) -> bool:
    """Whether the project's tests prove the ragged batch for the model: a family of theirs, with its own text model."""
    config = model.config
    is_own = type(config.get_text_config()).__module__ == type(config).__module__
    return config.model_type in FAMILIES and is_own and type(model).__module__.startswith("transformers.")
