"""Values that no engine can have."""

from __future__ import annotations

import dataclasses

import pytest

from polylens.config import EngineConfig
from polylens.errors import ModelLoadError

SWITCHES = [field.name for field in dataclasses.fields(EngineConfig) if isinstance(field.default, bool)]


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_is_on_or_off(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"{name} must be True or False, got 'no'"):
        EngineConfig(**{name: "no"})


def test_a_switch_is_no_share_of_memory() -> None:
    with pytest.raises(ModelLoadError, match="gpu_memory_utilization must be above 0"):
        EngineConfig(device="cuda", gpu_memory_utilization=True)
