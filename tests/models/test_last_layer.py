"""The last text layer computes the wanted rows alone, and gives them what it gives when it computes all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from polylens.engine.kv import LayerKV, PagedKV
from polylens.models.attention import RaggedBatch, SequenceRows, ragged_attention
from polylens.models.last_layer import LastLayer, all_rows

WIDTH = 8
LENGTHS = (9, 1, 6)
"""Rows of the sequences of a step; the second decodes."""
CACHED = (4, 5, 0)
"""Their tokens before it."""


class Layer(nn.Module):
    """A decoder layer: attention whose queries are turned by the position embeddings, then a layer for each row."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.config = layer_idx, SimpleNamespace()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rows_out: list[int] = []

    def forward(self, hidden_states: torch.Tensor, position_embeddings: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        q, k, v = (x[:, None] for x in self.qkv(hidden_states).chunk(3, -1))
        kwargs.pop("extra", None)
        attended, _ = ragged_attention(self, q * position_embeddings, k, v, None, **kwargs)
        self.rows_out.append(hidden_states.shape[1])
        return hidden_states + self.out(attended[:, :, 0])


class Recurrent(Layer):
    """A layer without keys and values."""

    def forward(self, hidden_states: torch.Tensor, position_embeddings: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.rows_out.append(hidden_states.shape[1])
        return hidden_states.cumsum(1)


class Text(nn.Module):
    def __init__(self, last: type[Layer] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(0), last(1)])
        LastLayer.put_into(self)

    def forward(self, x_1td: torch.Tensor, batch: RaggedBatch, **kwargs: Any) -> torch.Tensor:
        turned_1td = torch.arange(1.0, 1 + x_1td.shape[1])[None, :, None].cos()
        for layer in self.layers:
            x_1td = layer(x_1td, position_embeddings=turned_1td, polylens_batch=batch, **kwargs)
        return x_1td[0]

    @property
    def last(self) -> Any:
        return self.layers[-1]


@pytest.fixture
def text() -> Text:
    return new_text()


def new_text(last: type[Layer] = Layer) -> Text:
    torch.manual_seed(0)
    text = Text(last)
    text(torch.randn(1, 1, WIDTH), RaggedBatch([SequenceRows(0, 1, torch.arange(1))], torch.arange(1), new_store()))
    text.last.rows_out.clear()
    return text


def new_store() -> PagedKV:
    torch.manual_seed(1)
    store = PagedKV(
        dict.fromkeys(range(2), LayerKV((1, WIDTH), (1, WIDTH))),
        num_pages=4,
        page_tokens=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for layer in range(2):
        store.write(layer, torch.arange(32), torch.randn(32, 1, WIDTH), torch.randn(32, 1, WIDTH))
    return store


def step(wanted: list[int] | None) -> tuple[torch.Tensor, RaggedBatch]:
    """Embeddings (1, t, d) and the batch of LENGTHS."""
    rows, writes, start, slot = [], [], 0, 0
    for length, cached in zip(LENGTHS, CACHED, strict=True):
        slots_c = torch.arange(slot, slot + cached + length)
        rows.append(SequenceRows(start, start + length, slots_c))
        writes.append(slots_c[cached:])
        start, slot = start + length, slot + cached + length
    torch.manual_seed(2)
    return torch.randn(1, start, WIDTH), RaggedBatch(rows, torch.cat(writes), new_store(), wanted=wanted)


@pytest.mark.parametrize("wanted", [[8, 9, 15], [9], [15]])
def test_the_wanted_rows_are_those_of_the_whole_layer(text: Text, wanted: list[int]) -> None:
    x_1td, batch = step(wanted)
    with all_rows(text):
        expected = text(x_1td, batch)
    assert not batch.only_wanted
    again = step(wanted)[1]
    found = text(x_1td, again)
    torch.testing.assert_close(found, expected[wanted])
    assert again.only_wanted
    assert text.last.rows_out == [16, len(wanted)]
    for stored, right in zip(again.store.layer(1), batch.store.layer(1), strict=True):
        torch.testing.assert_close(stored, right)


def test_where_no_row_is_wanted_keys_and_values_are_all(text: Text) -> None:
    x_1td, batch = step([])
    before = batch.store.layer(1)[0].clone()
    assert text(x_1td, batch).shape == (0, WIDTH)
    assert text.last.rows_out == []
    assert not torch.equal(batch.store.layer(1)[0], before)


def test_where_most_rows_are_wanted_the_layer_runs_once(text: Text) -> None:
    x_1td, batch = step(list(range(9)))
    assert text(x_1td, batch).shape == (16, WIDTH)
    assert text.last.rows_out == [16]


def test_a_layer_with_other_arguments_computes_all_rows(text: Text) -> None:
    x_1td, batch = step([15])
    assert text(x_1td, batch, extra=torch.zeros(16)).shape == (16, WIDTH)
    assert not batch.only_wanted
    assert text.last.rows_out == [16]


def test_hidden_states_of_another_form_are_computed_whole(text: Text) -> None:
    """Several streams (Gemma 3n), say: which dimension holds the rows is then not known."""
    x_1td, batch = step([15])
    text.layers = text.layers[1:]
    x_2td = x_1td.expand(2, -1, -1)
    text.last.forward.__self__._whole = lambda hidden_states, **_: hidden_states
    assert text.last(x_2td, polylens_batch=batch).shape == x_2td.shape
    assert not batch.only_wanted


def test_a_layer_without_keys_runs_once() -> None:
    text = new_text(Recurrent)
    x_1td, batch = step([15])
    assert text(x_1td, batch).shape == (16, WIDTH)
    assert not batch.only_wanted
    assert text.last.rows_out == [16]


def test_adapters_are_told_which_rows_are_left(text: Text) -> None:
    told = []

    @contextmanager
    def only_rows(ranges: list[tuple[int, int]]) -> Iterator[None]:
        told.append(ranges)
        yield
        told.clear()

    x_1td, batch = step([8, 15])
    batch.only_rows = only_rows
    with batch.until_end:
        text(x_1td, batch)
        assert told == [[(8, 9), (15, 16)]], "until the norm after the layer has run"
    assert told == []


def test_it_is_put_into_a_model_once(text: Text) -> None:
    placed = text.last.forward
    LastLayer.put_into(text)
    assert text.last.forward == placed
