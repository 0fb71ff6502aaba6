"""The Triton kernels against the definition, under Triton's interpreter: the arithmetic, not the speed.

Its `tl.dot` gives garbage for bfloat16, so that type is checked on a GPU only (`benchmarks/gpu.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from polylens.core import Delta
from polylens.errors import InternalError
from polylens.lora.ops import apply_reference
from polylens.lora.routing import DeltaRows
from tests.lora.toys import make_delta

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2}


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pytest.importorskip("triton")
        import importlib

        from polylens.lora.kernels import triton_segments

        yield importlib.reload(triton_segments)  # the variable counts when the kernels are defined


def rows_of(spans: list[tuple[int, int, int]], num_in: int, num_out: int, dtype: torch.dtype) -> list[DeltaRows[Delta]]:
    """(rank, start, stop) each."""
    return [
        DeltaRows(make_delta("layer", num_in, num_out, rank, seed, dtype), start, stop)
        for seed, (rank, start, stop) in enumerate(spans)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "spans",
    [
        [(8, 0, 1)],
        [(4, 0, 1), (16, 1, 2), (3, 3, 5)],  # ranks differ, row 2 and the last are the base model's
        [(33, 0, 20), (1, 20, 23)],  # more rows than one program takes; a rank of several blocks
        [(5, 0, 70), (17, 75, 90)],
    ],
)
def test_equals_the_definition(kernels: ModuleType, spans: list[tuple[int, int, int]], dtype: torch.dtype) -> None:
    num_rows, num_in, num_out = spans[-1][2] + 1, 100, 70
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_rows, num_in, generator=generator).to(dtype)
    y = torch.randn(num_rows, num_out, generator=generator).to(dtype)
    rows = rows_of(spans, num_in, num_out, dtype)
    double = [DeltaRows(Delta("layer", d.a.double(), d.b.double(), d.scaling), i, j) for d, i, j in rows]
    expected = apply_reference(x.double(), y.double(), double)
    ours = y.clone()
    kernels.SegmentKernels().apply_factored_(x, ours, rows)
    torch.testing.assert_close(ours.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    base = torch.ones(num_rows, dtype=torch.bool)
    for _, start, stop in rows:
        base[start:stop] = False
    assert torch.equal(ours[base], y[base])


def test_rows_of_a_wider_tensor_and_no_rows(kernels: ModuleType) -> None:
    wide_x, wide_y = torch.randn(4, 60), torch.randn(4, 50)
    x, y = wide_x[:, :40], wide_y[:, :30]
    rows = rows_of([(4, 0, 3), (4, 3, 3)], 40, 30, torch.float32)
    expected = apply_reference(x, y, rows)
    untouched = wide_y[:, 30:].clone()
    run = kernels.SegmentKernels().apply_factored_
    run(x, y, rows)
    torch.testing.assert_close(y, expected, rtol=0, atol=2e-5)
    assert torch.equal(wide_y[:, 30:], untouched)
    run(x, y, [])
    torch.testing.assert_close(y, expected, rtol=0, atol=2e-5)


def test_tables_are_kept_and_few(kernels: ModuleType) -> None:
    segments = kernels.SegmentKernels(max_tables=2)
    x = torch.randn(3, 40)
    for spans in ([(4, 0, 1)], [(4, 0, 2)], [(4, 0, 3)], [(4, 0, 3)]):
        rows = rows_of(spans, 40, 30, torch.float32)
        y = torch.zeros(3, 30)
        segments.apply_factored_(x, y, rows)
        torch.testing.assert_close(y, apply_reference(x, torch.zeros(3, 30), rows), rtol=0, atol=2e-5)
    assert len(segments._tables) == 2


@pytest.mark.parametrize(
    "broken",
    [
        lambda d: Delta("layer", d.a[:, :39], d.b, 1.0),
        lambda d: Delta("layer", d.a, d.b[:29], 1.0),
        lambda d: Delta("layer", d.a.half(), d.b.half(), 1.0),
        lambda d: Delta("layer", d.a.t().contiguous().t(), d.b, 1.0),
    ],
)
def test_what_does_not_fit_never_reaches_the_kernel(kernels: ModuleType, broken) -> None:
    [row] = rows_of([(4, 0, 2)], 40, 30, torch.float32)
    y = torch.zeros(2, 30)
    with pytest.raises(InternalError, match="does not fit"):
        kernels.SegmentKernels().apply_factored_(torch.randn(2, 40), y, [row._replace(delta=broken(row.delta))])
    assert not y.any()
