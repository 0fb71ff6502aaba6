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

from tests.families.build import ALL_FAMILIES  # noqa: E402
from tests.families.fixtures import checkpoint, own_cache_folder  # noqa: E402, F401


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup`, tests that share something expensive run in one worker, so that it is made once."""
    for item in items:
        group = shared_by(item) if item.get_closest_marker("xdist_group") is None else None
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))


SHARED_FIXTURES = ("live", "reference", "engine_thread", "engine", "shop")
"""Session fixtures that take seconds."""


def shared_by(item: pytest.Item) -> str | None:
    """A family's checkpoint, adapters and reference answers; a fixture of a module; a server or an engine."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    named = [name for name in item.fixturenames if name in ALL_FAMILIES]
    family = parameters.get("family", parameters.get("bench", *named[:1]))
    if isinstance(family, str):
        return family
    if any(name in SHARED_FIXTURES for name in item.fixturenames):
        return item.path.parent.name
    definitions = item._fixtureinfo.name2fixturedefs.values()
    return str(item.path) if any(one[-1].scope == "module" for one in definitions) else None
