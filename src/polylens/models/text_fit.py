"""Whether a model's text part fits the engine's ragged batches, told from what the model is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polylens.models.components import text_model
from polylens.models.families import FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from polylens.models.families import FamilyNotes


def why_hosted(model: PreTrainedModel, processor: Any, notes: FamilyNotes) -> str | None:
    """The reason why transformers' own generation must run the model; None if the ragged batch does."""
    return _not_a_plain_decoder(model) or _unproven(model)


def _not_a_plain_decoder(model: PreTrainedModel) -> str | None:
    if model.config.is_encoder_decoder or model.config.get_text_config().is_encoder_decoder:
        return "it is an encoder-decoder"
    if any("CrossAttention" in type(module).__name__ for module in text_model(model).modules()):
        return "its text model attends to pictures in layers of its own (cross-attention)"
    return None


def _unproven(model: PreTrainedModel) -> str | None:
    if model.config.model_type in FAMILIES:
        return None
    return f"the ragged batch is not proven for {model.config.model_type!r}"
