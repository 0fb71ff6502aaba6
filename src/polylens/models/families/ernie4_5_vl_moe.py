"""ERNIE 4.5 VL: tokens of pictures and videos, and those around them, go to experts of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import arange, cat, isin, tensor

if TYPE_CHECKING:
    from polylens.models.text import TextStep

_KINDS = ("image", "video")
_VISION_TOKENS = tuple(f"{kind}{part}_token_id" for kind in _KINDS for part in ("", "_start", "_end"))
"""Config entries with the tokens that `processing_ernie4_5_vl_moe.create_moe_mm_token_type_ids` counts as vision."""


def text_arguments(step: TextStep) -> dict[str, Any]:
    """Which tokens go to the vision experts: those of the prompt only, as in transformers' own generation."""
    vision_ids = tensor([getattr(step.config, name) for name in _VISION_TOKENS], device=step.token_ids_t.device)
    in_prompt_t = cat([arange(rows.first_position, rows.num_context) < rows.num_prompt for rows in step.sequences])
    vision_t = isin(step.token_ids_t, vision_ids) & in_prompt_t.to(step.token_ids_t.device)
    return {"moe_mm_token_type_ids": vision_t[None].int()}
