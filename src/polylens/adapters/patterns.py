"""PEFT's rules for matching patterns of `adapter_config.json` against layer names.

Patterns come out of files, and Python's regular expressions can take exponential time: patterns whose
shape allows it are refused before they are run.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MAX_PATTERN_CHARS = 4096
"""Longest pattern compiled: trainers write alternations of full module names, a few kilobytes at most."""

MAX_OPEN_REPEATS = 12
"""Most `*`, `+` and `{` in one pattern: matching is polynomial of this degree. Trainers' patterns have up to 9."""

_REPEATED_GROUP = re.compile(r"\)[*+{]")


def pattern_fault(pattern: str) -> str | None:
    """Why `pattern` is not run: it does not compile, or its shape allows exponential time. None if it is fine."""
    if len(pattern) > MAX_PATTERN_CHARS:
        return f"a pattern of {len(pattern)} characters is too long (at most {MAX_PATTERN_CHARS})"
    if _REPEATED_GROUP.search(pattern) or sum(map(pattern.count, "*+{")) > MAX_OPEN_REPEATS:
        return f"the pattern {pattern[:80]!r} repeats a group, or repeats too often; write it simpler"
    try:
        re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, RecursionError, OverflowError) as error:
        return f"{pattern[:80]!r} is not a valid pattern: {error}"
    return None


def pattern_key(patterns: Iterable[str], name: str) -> str:
    """The first pattern that matches the end of `name` from a dot on, else `name` itself.

    Same as `peft.utils.other.get_pattern_key`.
    """
    return next((pattern for pattern in patterns if _matches(pattern, name)), name)


def num_values(patterns: Mapping[str, float], name: str) -> int:
    """How many different values the patterns that match `name` would give it."""
    return len({value for pattern, value in patterns.items() if _matches(pattern, name)})


def _matches(pattern: str, name: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def is_targeted(target_modules: Sequence[str] | str | None, name: str) -> bool:
    """Whether `target_modules` selects `name`: a string is a full match, a list matches whole or by its end.

    Same as `peft.tuners.tuners_utils.check_target_module_exists` without its layer restrictions.
    """
    if target_modules is None:
        return False
    if isinstance(target_modules, str):
        return target_modules == ALL_LINEAR or re.fullmatch(target_modules, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in target_modules)


ALL_LINEAR = "all-linear"
"""PEFT's word for every linear layer except the head."""
