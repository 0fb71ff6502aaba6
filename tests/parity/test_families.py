"""Every further family: base and adapters on every part of the model, in one batch, equal to merged models alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.families.build import ALL_FAMILIES, FAMILIES
from tests.families.host import HOSTED
from tests.parity.harness import Bench, more_questions, questions

FURTHER = tuple(name for name in ALL_FAMILIES if name not in {*FAMILIES, *HOSTED})
ALIASES = ("glmga", "cosmos3_omni", "minicpm_ocr")
"""Families of the same classes as others, or copies of them."""
IN_CI = [pytest.param(name, marks=pytest.mark.full if name in ALIASES else ()) for name in FURTHER]


@pytest.mark.parametrize("family", IN_CI)
def test_mixed_batch_equals_merged_models(family: str, bench_of: Callable[[str], Bench]) -> None:
    bench = bench_of(family)
    mode = "fused" if ALL_FAMILIES[family].amplifies_noise else "auto"
    with bench.llm(*bench.having("tower", "all"), max_step_tokens=64, apply_mode=mode) as llm:
        asked = [name for name in ("picture", "two", "video", "text") if name in questions(family)]
        bench.check(llm, bench.mixed(asked, ["base", "tower", "all"]), num_tokens=4)


MODES = [
    (family, mode)
    for family in FURTHER
    for mode in ("factored", "fused")
    if mode == "fused" or not ALL_FAMILIES[family].amplifies_noise
]


@pytest.mark.full
@pytest.mark.parametrize(("family", "mode"), MODES)
def test_all_shapes_in_both_modes(family: str, mode: str, bench_of: Callable[[str], Bench]) -> None:
    bench = bench_of(family)
    with bench.llm(apply_mode=mode) as llm:
        bench.check(llm, bench.mixed(questions(family)))
        bench.check(llm, bench.mixed(more_questions(family)))
