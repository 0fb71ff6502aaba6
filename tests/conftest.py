"""Shared test set-up: one thread a process (2-core machines, several workers), no hub access, and who runs what."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(1)

from tests.distribution import Groups  # noqa: E402
from tests.families.fixtures import checkpoint, loaded_of, own_cache_folder  # noqa: E402, F401


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Groups | None:
    """With several workers, unless another distribution than the default is asked for."""
    return Groups(config, log) if config.getoption("dist") == "load" else None
