"""vLLM's own LoRA on CPUs by products of segments: for who keeps vLLM's manager and worker.

Only where $POLYLENS_VLLM_CPU_LORA is 1. vLLM 0.32 gathers a (rows, out, rank) tensor of B for every layer call, which
makes a prefill several times slower, and indexes it with -1 for base rows, so that these get the last slot's adapter.
Here a run of rows of one slot is one product, and base rows are left alone.
"""

from __future__ import annotations

import os
from itertools import groupby
from typing import Any

from polylens.errors import RowRuleError

VARIABLE = "POLYLENS_VLLM_CPU_LORA"

Runs = tuple[tuple[int, int, int], ...]
"""(slot, first row, row after the last) of rows that have an adapter."""


def install() -> None:
    """Let vLLM's CPU platform choose `SegmentPunica`. Called by vLLM in all of its processes."""
    if os.environ.get(VARIABLE) != "1":
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        platform: Any = type(current_platform)
        platform.get_punica_wrapper = classmethod(lambda cls: f"{__name__}.SegmentPunica")


def runs_of(slots: list[int]) -> tuple[int, Runs]:
    """(number of rows, runs) of a slot for every row, -1 for the base model."""
    runs = []
    row = 0
    for slot, members in groupby(slots):
        start, row = row, row + len(list(members))
        if slot >= 0:
            runs.append((slot, start, row))
    return row, tuple(runs)


def __getattr__(name: str) -> Any:
    # The class needs vLLM, the plugin's entry point must not import it before vLLM has chosen its platform.
    if name == "SegmentPunica":
        found = globals()[name] = _make_class()
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _make_class() -> type:
    import torch
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    class SegmentPunica(PunicaWrapperCPU):
        """vLLM's CPU operations with one product for each run of rows of one adapter."""

        def update_metadata(self, mapping: Any, *args: Any, **kwargs: Any) -> None:
            super().update_metadata(mapping, *args, **kwargs)
            self._tokens = runs_of(self.token_lora_indices.tolist())
            self._sampled = runs_of(self.sampler_indices.tolist())

        def _apply_shrink(self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float) -> None:
            shrink_(y.view(-1, y.shape[-1]), x, w_t_all, scale, self._tokens)

        def _apply_expand(
            self,
            y: torch.Tensor,
            x: torch.Tensor,
            w_t_all: torch.Tensor,
            y_offset: int,
            y_slice_size: int,
            add_inputs: bool = True,
        ) -> None:
            expand_(y[:, y_offset : y_offset + y_slice_size], x, w_t_all, self._tokens, add_inputs)

        def add_lora_embedding(
            self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **_: Any
        ) -> None:
            expand_(y, x, lora_b_stacked, self._tokens, add_inputs)

        def add_lora_logits(
            self,
            y: torch.Tensor,
            x: torch.Tensor,
            lora_a_stacked: torch.Tensor,
            lora_b_stacked: torch.Tensor,
            scale: float,
            *,
            buffer: torch.Tensor | None = None,
            **_: Any,
        ) -> None:
            x = x.view(-1, x.shape[-1])
            if buffer is None:
                buffer = torch.zeros((x.size(0), lora_b_stacked.size(-1)), dtype=torch.float32, device=x.device)
            shrink_(buffer, x, lora_a_stacked, scale, self._sampled)
            expand_(y.view(-1, y.shape[-1]), buffer, lora_b_stacked, self._sampled, True)

    def shrink_(
        h_tr: torch.Tensor, x_ti: torch.Tensor, a: torch.Tensor, scale: float, routed: tuple[int, Runs]
    ) -> None:
        """h = scale · x Aᵀ on the runs' rows. a: (slots, 1, rank, in)."""
        for slot, start, stop in checked_runs(routed, len(x_ti)):
            h_tr[start:stop] = torch.mm(x_ti[start:stop].to(a.dtype), a[slot, 0].t()).to(h_tr.dtype) * scale

    def expand_(
        y_to: torch.Tensor, h_tr: torch.Tensor, b: torch.Tensor, routed: tuple[int, Runs], add_inputs: bool
    ) -> None:
        """y += h Bᵀ (or y = h Bᵀ) on the runs' rows. b: (slots, 1, out, rank); `y_to` may be wider."""
        width = b.shape[-2]
        for slot, start, stop in checked_runs(routed, len(h_tr)):
            own = y_to[start:stop, :width]
            own.addmm_(h_tr[start:stop].to(y_to.dtype), b[slot, 0].to(y_to.dtype).t(), beta=1 if add_inputs else 0)

    return SegmentPunica


def checked_runs(routed: tuple[int, Runs], num_rows: int) -> Runs:
    covered, runs = routed
    if covered != num_rows:
        raise RowRuleError(f"vLLM's mapping of rows to adapters covers {covered} rows, the layer has {num_rows}")
    return runs
