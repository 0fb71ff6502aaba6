from __future__ import annotations

import pytest
import torch

from polylens.adapters.finite import all_finite

INF = float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bad", [INF, -INF, float("nan")])
def test_one_bad_value_is_found(bad: float, dtype: torch.dtype) -> None:
    x = torch.randn(7, 9).to(dtype)
    assert all_finite(x)
    x[3, 4] = bad
    assert not all_finite(x)


def test_infinities_that_cancel_and_sums_that_overflow() -> None:
    assert not all_finite(torch.tensor([INF, -INF]))
    assert all_finite(torch.full((8,), 3e38))
    assert all_finite(torch.empty(0))
