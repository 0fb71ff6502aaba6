"""Both ways against the definition in float64, and their rounding against the merged weight's in 16 bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polylens.lora.ops import Scratch, apply_factored_, apply_fused_, apply_reference
from polylens.lora.routing import DeltaRows
from tests.lora.toys import make_delta

IN, OUT = 6, 10
OWNERS = st.lists(st.tuples(st.integers(1, 4), st.sampled_from([None, 0, 1, 2])), max_size=7)


def rows_of(owners: list[tuple[int, int | None]]) -> tuple[int, list[DeltaRows]]:
    deltas = [make_delta("layer", IN, OUT, rank, seed) for seed, rank in enumerate((1, 3, 20))]
    rows, row = [], 0
    for count, owner in owners:
        if owner is not None:
            rows.append(DeltaRows(deltas[owner], row, row + count))
        row += count
    return row, rows


def definition(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: list[DeltaRows]) -> torch.Tensor:
    """Row by row, from the formula."""
    y = x @ weight.T + (0 if bias is None else bias)
    for delta, start, stop in rows:
        for row in range(start, stop):
            y[row] += delta.scaling * (delta.b @ (delta.a @ x[row]))
    return y


@settings(deadline=None)
@given(OWNERS, st.booleans(), st.booleans())
def test_every_way_equals_the_definition(owners: list[tuple[int, int | None]], has_bias: bool, in_first: bool) -> None:
    num_rows, rows = rows_of(owners)
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, IN, generator=generator, dtype=torch.float64)
    weight = torch.randn(OUT, IN, generator=generator, dtype=torch.float64)
    bias = torch.randn(OUT, generator=generator, dtype=torch.float64) if has_bias else None
    base = torch.nn.functional.linear(x, weight, bias)
    expected = definition(x, weight, bias, rows)

    torch.testing.assert_close(apply_reference(x, base, rows), expected, rtol=0, atol=1e-11)
    factored = base.clone()
    apply_factored_(x, factored, rows)
    torch.testing.assert_close(factored, expected, rtol=0, atol=1e-11)
    fused = torch.full_like(base, float("nan"))
    kept = weight.T.contiguous() if in_first else weight
    apply_fused_(x, fused, kept, bias, rows, Scratch(), in_first=in_first)
    torch.testing.assert_close(fused, expected, rtol=0, atol=1e-11)


def test_factored_leaves_other_rows_bit_for_bit() -> None:
    x, y = torch.randn(5, IN), torch.randn(5, OUT)
    before = y.clone()
    apply_factored_(x, y, [DeltaRows(make_delta("layer", IN, OUT, 2, 0, torch.float32), 1, 3)])
    assert torch.equal(y[[0, 3, 4]], before[[0, 3, 4]])
    assert not torch.equal(y[1:3], before[1:3])


def test_fused_over_all_rows_is_the_merged_layer_bit_for_bit_and_one_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    delta = make_delta("layer", IN, OUT, 2, 0, torch.float32)
    x, weight, bias = torch.randn(5, IN), torch.randn(OUT, IN), torch.randn(OUT)
    merged = torch.addmm(weight, delta.b, delta.a, alpha=delta.scaling)
    expected = torch.nn.functional.linear(x, merged, bias)
    gemm_rows = []
    real = torch.addmm

    def counting(*args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        gemm_rows.append(args[1].shape[0])
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "addmm", counting)
    y = torch.empty(5, OUT)
    apply_fused_(x, y, weight, bias, [DeltaRows(delta, 0, 5)], Scratch())
    assert torch.equal(y, expected)
    assert gemm_rows == [OUT, 5]  # building W + sBA, then the layer once


def test_scratch_is_one_buffer_of_the_largest_weight() -> None:
    scratch = Scratch()
    small, large = torch.empty(3, 5), torch.empty(7, 4)
    assert scratch.like(small).shape == (3, 5)
    first = scratch.like(large)
    assert scratch.like(small).data_ptr() == first.data_ptr()
    assert scratch.num_bytes == large.numel() * 4
    assert scratch.like(small.bfloat16()).dtype is torch.bfloat16
    assert scratch.num_bytes == large.numel() * 4 + small.numel() * 2
    scratch.clear()
    assert scratch.num_bytes == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ["factored", "fused"])
@pytest.mark.parametrize("strength", [0.1, 1.0, 10.0])
def test_16_bit_error_is_near_that_of_the_merged_weight(dtype: torch.dtype, way: str, strength: float) -> None:
    """Error against the float32 merged result at most 1.5 times that of the 16-bit merged weight."""
    generator = torch.Generator().manual_seed(3)
    num_rows, width, out, rank = 64, 256, 192, 16
    x = torch.randn(num_rows, width, generator=generator).to(dtype)
    weight = (torch.randn(out, width, generator=generator) / width**0.5).to(dtype)
    delta = make_delta("layer", width, out, rank, 7, dtype)
    delta = type(delta)("layer", delta.a, (delta.b * strength / rank**0.5).to(dtype), delta.scaling)
    rows = [DeltaRows(delta, 0, num_rows)]
    merged = weight.double() + delta.scaling * (delta.b.double() @ delta.a.double())
    exact = x.double() @ merged.T
    merged_error = (x @ merged.to(dtype).T).double() - exact
    y = x @ weight.T
    if way == "factored":
        apply_factored_(x, y, rows)
    else:
        apply_fused_(x, y, weight, None, rows, Scratch())
    error = y.double() - exact
    assert error.norm() <= 1.5 * merged_error.norm()
    assert error.abs().max() <= 1.5 * merged_error.abs().max()
