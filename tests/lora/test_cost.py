from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polylens.lora.cost import Calibration, CostModel, calibrate, choose

DEFAULT = Calibration()
FEATURES = st.integers(1, 20_000)


@settings(deadline=None)
@given(FEATURES, FEATURES, st.integers(1, 512))
def test_few_rows_are_factored_and_very_many_fused(in_features: int, out_features: int, rank: int) -> None:
    if in_features >= 4 and out_features >= 4:
        assert choose(1, in_features, out_features, rank, DEFAULT) == "factored"
    assert choose(10 * in_features * out_features, in_features, out_features, rank, DEFAULT) == "fused"


@settings(deadline=None)
@given(st.integers(1, 10_000), FEATURES, FEATURES, st.integers(1, 512))
def test_more_rows_never_turn_fused_back_to_factored(rows: int, in_features: int, out_features: int, rank: int) -> None:
    if choose(rows, in_features, out_features, rank, DEFAULT) == "fused":
        assert choose(2 * rows, in_features, out_features, rank, DEFAULT) == "fused"


@settings(deadline=None)
@given(st.integers(1, 10_000), st.integers(1, 512))
def test_forced_modes_are_kept(rows: int, rank: int) -> None:
    assert CostModel("factored").choose(rows, 64, 64, rank) == "factored"
    assert CostModel("fused").choose(rows, 64, 64, rank) == "fused"
    assert CostModel("auto").choose(rows, 64, 64, rank) == choose(rows, 64, 64, rank, DEFAULT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calibration_is_quick_and_plausible(dtype: torch.dtype) -> None:
    start = time.perf_counter()
    measured = calibrate("cpu", dtype)
    assert time.perf_counter() - start < 5  # below 0.5 s on an idle machine; tests share theirs
    assert 1e7 < measured.flops_per_s < 1e15
    assert 1e6 < measured.values_per_s < 1e13
    assert 0 < measured.call_s < 0.1
