"""Gemma 4: a second embedding of the tokens, of which every layer takes its part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polylens.errors import ModelLoadError

if TYPE_CHECKING:
    from polylens.models.text import TextStep


def text_arguments(step: TextStep) -> dict[str, Any]:
    """Larger models have no such embedding. Media tokens have come as padding."""
    if not step.text.config.hidden_size_per_layer_input:
        return {}
    return {"per_layer_inputs": step.text.get_per_layer_inputs(step.embedded_ids_t[None], None)}


def sees_both_ways(text_config: Any) -> bool:
    """Whether pictures' tokens see each other. Raises ModelLoadError for models whose text does: they embed it."""
    if text_config.use_bidirectional_attention == "all":
        raise ModelLoadError("the model's text attends in both directions: it embeds text and cannot generate any")
    return text_config.use_bidirectional_attention == "vision"
