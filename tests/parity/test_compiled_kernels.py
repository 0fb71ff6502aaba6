"""With and without the compiled kernels for decode steps: the same answers, those of merged models."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polylens.native import compiled_kernels
from tests.parity.harness import Bench, mixed


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])  # gemma3: windows, and two-way spans
def test_both_equal_merged_models(family: str, compiled: bool, bench_of: Callable[[str], Bench]) -> None:
    if compiled and compiled_kernels() is None:
        pytest.skip("no C compiler here")
    bench = bench_of(family)
    with bench.llm(compile_kernels=compiled) as llm:
        assert (llm.engine._kernels is not None) is compiled
        bench.check(llm, mixed(["picture", "text"]))
