"""Key/value storage: one pair of tensors a layer, addressed by slot (page id x page size + offset)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from polylens.models.attention import RaggedBatch, SequenceRows
from polylens.models.positions import position_rows
from polylens.models.text import TextRunner

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polylens.models.loading import LoadedModel
    from polylens.models.recurrent import CarriedState


@dataclass(frozen=True)
class LayerKV:
    """Shape of one layer's cache for one token: (heads, width) of keys and of values."""

    key: tuple[int, int]
    value: tuple[int, int]

    @property
    def num_elements(self) -> int:
        return self.key[0] * self.key[1] + self.value[0] * self.value[1]


class PagedKV:
    """The store `ragged_attention` reads and writes. Pages are the allocator's business, slots are ours."""

    def __init__(
        self,
        layers: Mapping[int, LayerKV],
        *,
        num_pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_tokens = page_tokens
        slots = num_pages * page_tokens
        self._keys = {i: torch.zeros(slots, *kv.key, dtype=dtype, device=device) for i, kv in layers.items()}
        self._values = {i: torch.zeros(slots, *kv.value, dtype=dtype, device=device) for i, kv in layers.items()}

    def write(self, layer: int, slots_t: torch.Tensor, k_tge: torch.Tensor, v_tge: torch.Tensor) -> None:
        self._keys[layer][slots_t] = k_tge
        self._values[layer][slots_t] = v_tge

    def read(self, layer: int, slots_c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._keys[layer][slots_c], self._values[layer][slots_c]

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._keys[layer], self._values[layer]

    def slots(self, page_table: list[int], start: int, stop: int) -> torch.Tensor:
        """Slots of a sequence's tokens [start, stop), (stop - start,)."""
        positions = torch.arange(start, stop)
        pages = torch.tensor(page_table)
        return pages[positions // self.page_tokens] * self.page_tokens + positions % self.page_tokens


class _ShapeRecorder:
    """A store that only notes the shapes the layers write."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerKV] = {}

    def write(self, layer: int, slots_t: torch.Tensor, k_tge: torch.Tensor, v_tge: torch.Tensor) -> None:
        self.layers[layer] = LayerKV((k_tge.shape[1], k_tge.shape[2]), (v_tge.shape[1], v_tge.shape[2]))

    def read(self, layer: int, slots_c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("a fresh sequence has no context to read")

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("a fresh sequence has no context to read")


@torch.inference_mode()
def _measure_kv(text: TextRunner, position_rows: int) -> tuple[dict[int, LayerKV], int]:
    """Learn every layer's cache shape by running one token: heads and widths may differ from layer to layer.

    position_rows: of `prompt_positions`. Also returns the bytes of the state that a sequence
    carries beside its cache, of whatever length it is (0 for most models).
    """
    recorder = _ShapeRecorder()
    carried = _run_apart(text, 1, position_rows, recorder)
    return recorder.layers, sum(state.num_bytes for state in carried)


@dataclass(frozen=True, eq=False)
class MeasuredText:
    """A loaded text model, with what its layers keep: of each token, and of a sequence beside its tokens."""

    runner: TextRunner
    position_rows: int
    layers: Mapping[int, LayerKV]
    state_bytes: int
    dtype: torch.dtype

    @classmethod
    def of(cls, loaded: LoadedModel) -> MeasuredText:
        runner, rows = TextRunner(loaded), position_rows(loaded.inner)
        layers, state_bytes = _measure_kv(runner, rows)
        return cls(runner, rows, layers, state_bytes, loaded.dtype)

    @property
    def token_bytes(self) -> int:
        return sum(kv.num_elements for kv in self.layers.values()) * self.dtype.itemsize

    def storage(self, num_pages: int, page_tokens: int) -> PagedKV:
        return PagedKV(
            self.layers, num_pages=num_pages, page_tokens=page_tokens, dtype=self.dtype, device=self.runner.device
        )


def rehearse(text: TextRunner, num_tokens: int, position_rows: int) -> None:
    """Run the text model on so many tokens, for layers that learn from a call what their inputs look like."""
    _run_apart(text, num_tokens, position_rows, _ShapeRecorder())


def _run_apart(text: TextRunner, num_tokens: int, position_rows: int, store: _ShapeRecorder) -> list[CarriedState]:
    """A step of one fresh sequence that leaves nothing in the engine's pages; returns the state it carries."""
    tokens = torch.zeros(num_tokens, dtype=torch.long)
    carried = [text.new_state()] if text.carries_state else []
    batch = RaggedBatch([SequenceRows(0, num_tokens, tokens)], tokens, store, carried=carried)
    positions = torch.arange(num_tokens, device=text.device).expand(position_rows, -1)
    text.forward(tokens.to(text.device), positions, batch, None)
    return carried
