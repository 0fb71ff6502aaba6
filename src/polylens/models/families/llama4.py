"""Llama 4: the projector stands outside `get_image_features`; queries far into a context are scaled up; every expert
runs on every token."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

from polylens.core import MediaKind
from polylens.models.attention import set_query_scale
from polylens.models.families.notes import get_features


def encode(inner: Any, kind: MediaKind, batch: Mapping[str, torch.Tensor]) -> Any:
    """Projected features (rows, d)."""
    states_tnd = get_features(inner, kind, batch).last_hidden_state
    return SimpleNamespace(pooler_output=inner.multi_modal_projector(states_tnd.flatten(0, 1)))


def are_experts(module: torch.nn.Module) -> bool:
    """Whether these are experts that are given all tokens, one expert after the other, with the scores in them."""
    return isinstance(module, Llama4TextExperts)


def scale_queries_by_position(text: torch.nn.Module) -> None:
    """Take the scaling of layers without rotary positions over from transformers, which counts a batch's rows."""
    attention: Any
    for attention in text.modules():
        if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:
            attention.attn_temperature_tuning = False
            scale = partial(query_scale, floor=attention.floor_scale, strength=attention.attn_scale)
            set_query_scale(attention, scale)


def query_scale(positions_t: torch.Tensor, *, floor: int, strength: float) -> torch.Tensor:
    """1 + strength · log(1 + ⌊(position + 1) / floor⌋), as in transformers' `Llama4TextAttention`; (t,) float32."""
    return torch.log1p(torch.floor((positions_t.float() + 1.0) / floor)) * strength + 1.0
