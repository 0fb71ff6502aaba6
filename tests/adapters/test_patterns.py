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
from polylens.adapters.patterns import Patterns, is_targeted, pattern_fault
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


REFUSED = [
    "(a+)+$",
    "(a|a)*b",
    "(",
    "a)|(b",
    "x" * 5000,
    "(?:a*){20}",
    ".*a" * 4,
    "a?" * 30 + "a" * 30,
    "(a|a)" * 30,
    "(a|a|a|a|a|a|a|a)" * 9,
]


@pytest.mark.parametrize("pattern", REFUSED)
def test_dangerous_patterns_are_not_run(pattern: str) -> None:
    assert pattern_fault(pattern) is not None


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        "^model.layers.0.self_attn.q_proj",
        r"model\.visual\.blocks\.\d+\.attn\.qkv",
        r".*\.visual\..*\.(qkv|proj|fc1|fc2)",
        r"layers\.(0|1|2|3)\.(self_attn|mlp)\.(q|k|v|o|up|down|gate)_proj",
        r"(?:model\.)?language_model.*layers\.\d+\..*_proj",
    ],
)
def test_usual_patterns_are_run(pattern: str) -> None:
    assert pattern_fault(pattern) is None


@settings(max_examples=200, deadline=None)
@given(st.text("ab.*+?|()", max_size=14), st.integers(1, 100).map(lambda n: "a" * n + "b." * n))
def test_allowed_patterns_run_quickly(pattern: str, name: str) -> None:
    if pattern_fault(pattern) is None:
        started = time.perf_counter()
        Patterns({pattern: 1}).matching(name[-200:])
        assert time.perf_counter() - started < 2
