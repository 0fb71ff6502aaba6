"""Fixtures every test may use: the tiny checkpoints, built once a process, and pictures to show them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from polylens.config import EngineConfig
from polylens.disk_cache import CACHE_VARIABLE, DiskCache
from polylens.lora.cost import CALIBRATION_VERSION, Calibration, machine_facts
from polylens.models.loading import LoadedModel, load_model
from tests.families.build import build_checkpoint


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What one run of the tests measured serves only it: none from the user's cache, none left there.

    The cost model's constants are the default ones, as if measured: tests choose the same way on every machine.
    """
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.getbasetemp()
        folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder  # which the workers share
        patch.setenv(CACHE_VARIABLE, str(folder / "polylens-cache"))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            facts = machine_facts(torch.device("cpu"), dtype)
            DiskCache("cost", CALIBRATION_VERSION).store(facts, asdict(Calibration()))
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint(family)`: folder of the family's float32 checkpoint (built on first use, about 0.1 s)."""
    return functools.cache(lambda family: build_checkpoint(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="module")
def loaded_of(checkpoint: Callable[[str], Path]) -> Callable[[str], LoadedModel]:
    """`loaded_of(family)`: the family's checkpoint, loaded."""
    return functools.cache(lambda family: load_model(checkpoint(family), EngineConfig()))
