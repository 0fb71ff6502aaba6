"""Warnings about what is odd and changes nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.adapters.fake_layers import (
    TOWER,
    factors,
    fake_layers,
    load,
)


def test_warnings(tmp_path: Path) -> None:
    tensors = factors(TOWER)
    tensors[f"base_model.model.{TOWER}.lora_B.weight"].zero_()
    _, report = load(tmp_path, tensors, target_modules=["other"])
    assert "does not name 1 layers" in report.warnings[0]
    assert "a delta of zero" in report.warnings[1]
    assert load(tmp_path, factors(TOWER), target_modules=r".*\.attn\.qkv")[1].warnings == ()
    assert load(tmp_path, factors(TOWER), target_modules="all-linear")[1].warnings == ()
    assert load(tmp_path, factors(TOWER), target_modules="(a+)+b")[1].warnings == ()


@pytest.mark.parametrize(
    ("trained_on", "warned"),
    [("org/base-7b", False), ("/data/Base-7B/", False), (None, False), ("org/base-7b-instruct", True)],
)
def test_another_base_model_is_a_warning_where_all_fits(tmp_path: Path, trained_on: str | None, warned: bool) -> None:
    layers = dataclasses.replace(fake_layers(), source="other/base-7b")
    _, report = load(tmp_path, factors(TOWER), layers, base_model_name_or_path=trained_on)
    assert bool(report.warnings) == warned
    assert not warned or f"was trained on {trained_on}" in report.warnings[0]
