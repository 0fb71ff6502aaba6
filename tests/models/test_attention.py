"""Ragged attention against its plain definition: every token's softmax over exactly the tokens it may see."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polylens.errors import InternalError, ModelLoadError
from polylens.models.attention import RaggedBatch, Reach, SequenceRows, attention_mask_nc, ragged_attention

HEADS, KV_HEADS, WIDTH = 4, 2, 8


class DictStore:
    """A KV store of one tensor pair, addressed by slot."""

    def __init__(self, num_slots: int) -> None:
        self.k = torch.zeros(num_slots, KV_HEADS, WIDTH)
        self.v = torch.zeros(num_slots, KV_HEADS, WIDTH)

    def write(self, layer: int, slots_t: torch.Tensor, k_tge: torch.Tensor, v_tge: torch.Tensor) -> None:
        self.k[slots_t], self.v[slots_t] = k_tge, v_tge

    def read(self, layer: int, slots_c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k[slots_c], self.v[slots_c]


Ranges = tuple[tuple[int, int], ...]


def may_see(q: int, k: int, spans: Ranges, holes: Ranges, window: int | None, chunk: int | None, beyond: bool) -> bool:
    """The definition: causal or in the same span and in none of its holes, and within the window and the chunk.

    beyond: causal and within the window and the chunk, or in the same span.
    """
    in_hole = any(a <= x < b for a, b in holes for x in (q, k))
    same_span = any(a <= q < b and a <= k < b for a, b in spans) and not in_hole
    near = (window is None or k > q - window) and (chunk is None or k // chunk == q // chunk)
    return (k <= q and near) or same_span if beyond else (k <= q or same_span) and near


def layer(chunk: int | None = None) -> SimpleNamespace:
    """An attention module as its config describes it."""
    kinds = ["chunked_attention" if chunk else "full_attention"]
    return SimpleNamespace(layer_idx=0, config=SimpleNamespace(layer_types=kinds, attention_chunk_size=chunk))


def plain_attention(
    q_nhe: torch.Tensor,
    k_cge: torch.Tensor,
    v_cge: torch.Tensor,
    mask_nc: torch.Tensor,
    softcap: float | None = None,
) -> torch.Tensor:
    groups = HEADS // KV_HEADS
    k_che, v_che = k_cge.repeat_interleave(groups, 1), v_cge.repeat_interleave(groups, 1)
    scores = torch.einsum("nhe,che->hnc", q_nhe, k_che) * WIDTH**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask_nc, float("-inf")).softmax(-1)
    return torch.einsum("hnc,che->nhe", weights, v_che)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[int, int, Ranges, Ranges]:
    """(context length, new rows, spans that the new rows do not cut, holes)."""
    length = draw(st.integers(1, 24))
    edges = sorted(draw(st.sets(st.integers(0, length), max_size=4)))
    spans = tuple(zip(edges[::2], edges[1::2], strict=False))
    first = draw(st.integers(0, length - 1))
    for a, b in spans:
        if a < first < b:
            first = a
    holes = tuple((a + 1, a + 1 + draw(st.integers(0, 3))) for a, _ in spans)
    return length, length - first, spans, holes


@settings(max_examples=60, deadline=None)
@given(
    st.lists(sequences(), min_size=1, max_size=4),
    st.sampled_from([(None, None), (1, None), (3, None), (100, None), (None, 4), (None, 100)]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 0.7]),
    st.integers(0, 99),
)
def test_equals_the_plain_definition(
    drawn: list[tuple[int, int, Ranges, Ranges]],
    reach: tuple[int | None, int | None],
    in_windows_only: bool,
    beyond: bool,
    softcap: float | None,
    seed: int,
) -> None:
    window, chunk = reach
    g = torch.Generator().manual_seed(seed)
    slots = torch.randperm(sum(length for length, _, _, _ in drawn), generator=g)
    store = DictStore(len(slots))
    rows, writes, ks, vs, qs, expected = [], [], [], [], [], []
    row = slot = 0
    for length, new, spans, holes in drawn:
        mine = slots[slot : slot + length]
        k, v = (torch.randn(length, KV_HEADS, WIDTH, generator=g) for _ in range(2))
        q = torch.randn(new, HEADS, WIDTH, generator=g)
        store.write(0, mine[: length - new], k[: length - new], v[: length - new])
        rows.append(SequenceRows(row, row + new, mine, spans, holes=holes))
        writes.append(mine[length - new :])
        ks.append(k[length - new :]), vs.append(v[length - new :]), qs.append(q)
        seen = () if in_windows_only and window is None else spans
        mask = torch.tensor(
            [
                [may_see(i, j, seen, holes, window, chunk, beyond) for j in range(length)]
                for i in range(length - new, length)
            ]
        )
        # An image span wider than the window hides some of its own tokens, as in transformers.
        expected.append(plain_attention(q, k, v, mask, softcap))
        row, slot = row + new, slot + length
    batch = RaggedBatch(rows, torch.cat(writes), store, in_windows_only, beyond)
    flat = [torch.cat(x).transpose(0, 1)[None] for x in (qs, ks, vs)]
    out, _ = ragged_attention(
        layer(chunk),
        *flat,
        None,
        scaling=WIDTH**-0.5,
        sliding_window=window,
        softcap=softcap,
        polylens_batch=batch,
    )
    torch.testing.assert_close(out[0], torch.cat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("new", [1, 2, 7, 12])
def test_a_prompt_that_stays_in_reach(new: int) -> None:
    length, num_prompt, window = 12, 6, 3
    g = torch.Generator().manual_seed(new)
    store, slots = DictStore(length), torch.randperm(length, generator=g)
    k, v = (torch.randn(length, KV_HEADS, WIDTH, generator=g) for _ in range(2))
    q = torch.randn(new, HEADS, WIDTH, generator=g)
    store.write(0, slots[: length - new], k[: length - new], v[: length - new])
    rows = SequenceRows(0, new, slots, num_prompt=num_prompt)
    config = SimpleNamespace(layer_types=["reference_sliding_attention"], sliding_window=window)
    module = SimpleNamespace(layer_idx=0, config=config)
    flat = [x.transpose(0, 1)[None] for x in (q, k[length - new :], v[length - new :])]
    batch = RaggedBatch([rows], slots[length - new :], store)
    out, _ = ragged_attention(module, *flat, None, scaling=WIDTH**-0.5, polylens_batch=batch)
    mask = [[j <= i and (j < num_prompt or i - j < window) for j in range(length)] for i in range(length - new, length)]
    torch.testing.assert_close(out[0], plain_attention(q, k, v, torch.tensor(mask)), rtol=1e-5, atol=1e-5)


def test_plain_causal_needs_no_mask() -> None:
    rows = SequenceRows(0, 5, torch.arange(5))
    assert attention_mask_nc(rows, Reach(), torch.device("cpu")) is None
    assert attention_mask_nc(rows, Reach(window=5), torch.device("cpu")) is None
    assert attention_mask_nc(rows, Reach(window=4), torch.device("cpu")) is not None
    assert attention_mask_nc(rows, Reach(chunk=5), torch.device("cpu")) is None
    assert attention_mask_nc(rows, Reach(chunk=4), torch.device("cpu")) is not None


@pytest.mark.parametrize("argument", ["s_aux", "position_bias", "block_indices", "one_of_tomorrow"])
def test_options_that_are_not_served_are_refused(argument: str) -> None:
    x = torch.zeros(1, 2, 1, WIDTH)
    batch = RaggedBatch(
        [SequenceRows(0, 1, torch.zeros(1, dtype=torch.long))], torch.zeros(1, dtype=torch.long), DictStore(1)
    )
    with pytest.raises(ModelLoadError, match=argument):
        ragged_attention(layer(), x, x, x, None, polylens_batch=batch, **{argument: torch.zeros(1)})


def test_a_call_without_its_batch_is_an_internal_error() -> None:
    x = torch.zeros(1, 2, 1, WIDTH)
    with pytest.raises(InternalError):
        ragged_attention(layer(), x, x, x, None)
