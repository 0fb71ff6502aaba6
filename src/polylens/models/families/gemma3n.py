"""Gemma 3n: tokens from a certain id on, which bound pictures and sounds, are embedded as these are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from polylens.models.text import TextStep


def embed(inner: Any, ids_t: torch.Tensor, x_td: torch.Tensor) -> torch.Tensor:
    """transformers gives each of the two further tables the last of its tokens for all that are not its own."""
    first_sound = inner.embed_audio.vocab_offset
    pictures_t = (ids_t >= inner.embed_vision.vocab_offset) & (ids_t < first_sound)
    x_td = _embedded(inner.embed_vision, ids_t, pictures_t, x_td)
    return _embedded(inner.embed_audio, ids_t, ids_t >= first_sound, x_td)


def _embedded(table: Any, ids_t: torch.Tensor, own_t: torch.Tensor, x_td: torch.Tensor) -> torch.Tensor:
    if not own_t.any():
        return x_td
    last = table.vocab_offset + table.vocab_size - 1
    rows_td = table(input_ids=torch.where(own_t, ids_t, last)[None])[0]
    return torch.where(own_t[:, None], rows_td.to(x_td.dtype), x_td)


def text_arguments(step: TextStep) -> dict[str, Any]:
    """The second embedding of the tokens, of which every layer takes its part."""
    return {"per_layer_inputs": step.text.get_per_layer_inputs(step.token_ids_t[None])}
