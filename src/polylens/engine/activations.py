"""Record what adapted layers put out: in a mixed batch for one adapter's rows, in a merged model for all rows."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from polylens.core import LayerKind
from polylens.models.families.llama4 import are_experts
from polylens.models.last_layer import all_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from polylens.core import Adapter, LayerSpec
    from polylens.engine.llm import LLM
    from polylens.lora.routing import DeltaRows
    from polylens.models.row_rules import RowRule

Recorded = dict[str, list[torch.Tensor]]
"""Layer name -> output rows of each call, (n, out) on the CPU, in call order."""


@contextmanager
def record_adapter_rows(llm: LLM, adapter: Adapter) -> Iterator[Recorded]:
    """Record, for every layer the adapter changes, the output rows that are the adapter's own.

    Which rows those are is what the engine decides when the layer runs; whether it decided right is what a
    comparison with the merged model shows.
    """
    context = llm.engine.context
    ask = context.delta_rows
    asked: dict[str, tuple[DeltaRows, ...]] = {}

    def remember(spec: LayerSpec, rule: RowRule, num_rows: int) -> tuple[DeltaRows, ...]:
        asked[spec.name] = ask(spec, rule, num_rows)
        return asked[spec.name]

    def own_rows(layer: str, output_no: torch.Tensor) -> list[torch.Tensor]:
        wanted = adapter.deltas[layer]
        return [output_no[rows.start : rows.stop] for rows in asked.pop(layer, ()) if rows.delta is wanted]

    context.delta_rows = remember  # type: ignore[method-assign]  # taken back below
    try:
        with _record(llm, list(adapter.deltas), own_rows) as recorded:
            yield recorded
    finally:
        del context.delta_rows


@contextmanager
def record_all_rows(llm: LLM, layers: Sequence[str]) -> Iterator[Recorded]:
    """Record every output row of these layers."""
    with _record(llm, layers, lambda _layer, output_no: [output_no]) as recorded:
        yield recorded


@contextmanager
def _record(
    llm: LLM, layers: Sequence[str], choose: Callable[[str, torch.Tensor], list[torch.Tensor]]
) -> Iterator[Recorded]:
    recorded: Recorded = defaultdict(list)
    specs = llm.loaded.layers.specs

    def hook_for(layer: str) -> Callable[[nn.Module, object, torch.Tensor | tuple[torch.Tensor, ...]], None]:
        def hook(module: nn.Module, _inputs: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
            # A router also says which experts it chose; its scores come first.
            output = (output[0] if isinstance(output, tuple) else output).detach()
            rows_no = _rows(output, specs[layer], dense=are_experts(module))
            recorded[layer] += [rows.to("cpu", copy=True) for rows in choose(layer, rows_no)]

        return hook

    handles = [
        llm.loaded.model.get_submodule(specs[layer].module).register_forward_hook(hook_for(layer))
        for layer in layers
        # Of heads, which vectors are whose differs by family; a shared parameter has no outputs of its own.
        if specs[layer].kind not in (LayerKind.HEAD_NORM, LayerKind.SHARED)
    ]
    try:
        with all_rows(llm.loaded.text_model):
            yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _rows(output: torch.Tensor, spec: LayerSpec, *, dense: bool) -> torch.Tensor:
    """What routing calls rows, (n, out).

    Of a patch embedding its leading index, a patch or a whole tile, or the patches of one strip; of experts that all
    see every token (dense), the outputs of all experts for one token.
    """
    if dense:
        return output.view(spec.num_experts, -1, output.shape[-1]).transpose(0, 1).flatten(1)
    if spec.kind is not LayerKind.CONV:
        return output.reshape(-1, output.shape[-1])
    is_strip = output.dim() == 4 and output.shape[0] == 1 and output.shape[2] == 1
    return (output.permute(3, 1, 2, 0) if is_strip else output).flatten(1)
