"""ERNIE 4.5 VL: tokens of pictures and videos, and those around them, go to experts of their own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import TYPE_CHECKING, Any

from torch import arange, cat, isin, nn, tensor
from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import Ernie4_5_VLMoeMoeBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

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


def route_by_kind(text: nn.Module) -> None:
    """Tell adapters which rows of a step are given to the experts of one kind of token. Once for a text model."""
    blocks = [module for module in text.modules() if isinstance(module, Ernie4_5_VLMoeMoeBlock)]
    if any("forward" in block.text_moe.__dict__ for block in blocks):
        return
    step = _Step()
    text.register_forward_pre_hook(step.begin, with_kwargs=True)
    for block in blocks:
        for experts, is_vision in ((block.text_moe, False), (block.vision_moe, True)):
            experts.forward = _OneKind(experts, step, is_vision).forward


class _Step:
    """The rows of either kind in the step that runs now."""

    def __init__(self) -> None:
        self._ranges: Mapping[bool, Sequence[tuple[int, int]]] | None = None
        self._only_rows: Callable[[Sequence[tuple[int, int]]], AbstractContextManager[Any]] = nullcontext

    def begin(self, text: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Before each call of the text model. Without vision tokens the experts of text see all rows as they are."""
        types, batch = kwargs.get("moe_mm_token_type_ids"), kwargs.get("polylens_batch")
        is_vision = [] if types is None or batch is None else types[0].bool().tolist()
        self._ranges = {kind: _ranges(is_vision, kind) for kind in (False, True)} if any(is_vision) else None
        if batch is not None:
            self._only_rows = batch.only_rows

    def rows(self, is_vision: bool) -> AbstractContextManager[Any]:
        return nullcontext() if self._ranges is None else self._only_rows(self._ranges[is_vision])


class _OneKind:
    """The forward of the experts of one kind of token, with the rows of that kind."""

    def __init__(self, experts: nn.Module, step: _Step, is_vision: bool) -> None:
        self._base: Callable[[Tensor], Any] = experts.forward
        self._step = step
        self._is_vision = is_vision

    def forward(self, hidden_states: Tensor) -> Any:
        with self._step.rows(self._is_vision):
            return self._base(hidden_states)


def _ranges(flags: Sequence[bool], wanted: bool) -> list[tuple[int, int]]:
    """[start, stop) of every run of `wanted`."""
    ranges, start = [], 0
    for flag, run in groupby(flags):
        stop = start + sum(1 for _ in run)
        if flag is wanted:
            ranges.append((start, stop))
        start = stop
    return ranges
