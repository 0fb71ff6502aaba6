"""One bench a family and test process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.families.build import FAMILIES
from tests.parity.harness import Bench


@pytest.fixture(scope="session")
def bench_of(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bench]:
    benches: dict[str, Bench] = {}

    def bench(family: str) -> Bench:
        if family not in benches:
            benches[family] = Bench(family, checkpoint(family), tmp_path_factory.mktemp(f"adapters-{family}"))
        return benches[family]

    return bench


@pytest.fixture(params=FAMILIES)
def bench(request: pytest.FixtureRequest, bench_of: Callable[[str], Bench]) -> Bench:
    """The bench of each family in turn."""
    return bench_of(request.param)
