"""A tiny checkpoint and an adapter of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.families.adapters import make_adapter
from tests.families.build import build_checkpoint


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("qwen2_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="package")
def made(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("adapter")
    make_adapter(checkpoint, place, targets="all", rank=2, seed=1)
    return place


@pytest.fixture
def adapter(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "adapter"))
