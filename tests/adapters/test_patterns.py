"""Pattern rules are PEFT's, compared with PEFT itself."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from polylens.adapters.options import parse_options
from polylens.adapters.patterns import is_targeted, pattern_fault, pattern_key
from tests.adapters.fake_layers import config

PARTS = st.sampled_from(["model", "layers", "0", "1", "10", "q_proj", "k_proj", "proj", "visual", "mlp"])
NAMES = st.lists(PARTS, min_size=1, max_size=5).map(".".join)
PATTERNS = st.one_of(
    NAMES,
    NAMES.map(lambda name: f"^{name}"),
    NAMES.map(re.escape),
    NAMES.map(lambda name: name.replace("0", r"\d+")),
    st.tuples(NAMES, NAMES).map("|".join),
    st.tuples(PARTS, PARTS).map(r".*\.".join),
    st.text("qkv_proj.*+?|()[]0^$\\", max_size=8),
).filter(lambda pattern: pattern_fault(pattern) is None)


@given(st.lists(PATTERNS, max_size=4, unique=True), NAMES)
def test_pattern_key(patterns: list[str], name: str) -> None:
    assert pattern_key(patterns, name) == get_pattern_key(patterns, name)


@given(st.dictionaries(PATTERNS, st.integers(1, 64), max_size=4), NAMES)
def test_rank_and_alpha_as_peft_takes_them(pattern: dict[str, int], name: str) -> None:
    options = parse_options(config(r=3, lora_alpha=5, rank_pattern=pattern, alpha_pattern=pattern))
    expected = pattern.get(get_pattern_key(pattern.keys(), name))
    assert options.rank_of(name) == (3 if expected is None else expected)
    assert options.alpha_of(name) == (5 if expected is None else expected)


@given(st.one_of(st.lists(NAMES, min_size=1, max_size=3), PATTERNS), NAMES)
def test_target_modules(target: list[str] | str, name: str) -> None:
    if target in ("", "all-linear"):
        return
    expected = check_target_module_exists(LoraConfig(target_modules=target), name)
    assert is_targeted(target, name) == bool(expected)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "(", "a{1,", "x" * 5000, "(?:a*){20}", ".*" * 13])
def test_dangerous_patterns_are_not_run(pattern: str) -> None:
    assert pattern_fault(pattern) is not None or re.compile(pattern)
    if pattern != "a{1,":
        assert pattern_fault(pattern) is not None


@settings(max_examples=30, deadline=None)
@given(st.text("ab.*+?|()", max_size=12), st.text("ab.", min_size=1, max_size=64))
def test_allowed_patterns_run_quickly(pattern: str, name: str) -> None:
    if pattern_fault(pattern) is None:
        started = time.perf_counter()
        pattern_key([pattern], name)
        assert time.perf_counter() - started < 1
