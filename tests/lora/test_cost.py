from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polylens.lora.cost import Calibration, CostModel, calibrate, choose, kept_calibration

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


def test_the_calibration_is_kept_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    first = kept_calibration(device, torch.float32, tmp_path)
    monkeypatch.setattr("polylens.lora.cost.calibrate", lambda *_: pytest.fail("measured again"))
    assert kept_calibration(device, torch.float32, tmp_path) == first


@pytest.mark.parametrize("changed", ["dtype", "threads"])
def test_another_setting_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    measured: list[torch.dtype] = []

    def measure(_device: torch.device, dtype: torch.dtype) -> Calibration:
        measured.append(dtype)
        return Calibration(call_s=float(len(measured)))

    monkeypatch.setattr("polylens.lora.cost.calibrate", measure)
    device = torch.device("cpu")
    kept_calibration(device, torch.float32, tmp_path)
    if changed == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    other = kept_calibration(device, torch.bfloat16 if changed == "dtype" else torch.float32, tmp_path)
    assert other.call_s == 2


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"call_s": "x"}', '{"call_s": 0.0}', '{"call_s": NaN}', '{"speed": 1}']
)
def test_a_damaged_file_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setattr("polylens.lora.cost.calibrate", lambda *_: Calibration(call_s=3.0))
    device = torch.device("cpu")
    kept_calibration(device, torch.float32, tmp_path)
    [file] = tmp_path.rglob("*.json")
    file.write_text(content)
    assert kept_calibration(device, torch.float32, tmp_path).call_s == 3.0
