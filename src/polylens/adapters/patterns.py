"""PEFT's rules for matching patterns of `adapter_config.json` against layer names.

Patterns come out of files, and Python's regular expressions can take exponential time while they block
every thread: patterns whose shape allows it are refused before they are run.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ALL_LINEAR = "all-linear"
"""PEFT's word for every linear layer except the head."""

MAX_NAME_CHARS = 200
"""Longest module path patterns are run over: real ones have under 120 characters."""

MAX_LOG10_STEPS = 7.5
"""Bound (log10) on the backtracking steps of one match: below a second. Trainers' patterns need up to 7.2."""

MAX_PATTERN_CHARS = 4096
"""Longest pattern compiled: a pattern is a module path or an alternation of a few."""

_PLAIN = re.compile(r"\^?[\w.]+")
_REPEAT = re.compile(r"[*+{]")
_OPTION = re.compile(r"(?<![(*+?}])\?")
_REPEATED_GROUP = re.compile(r"\)[*+{]")


class Patterns:
    """An ordered table pattern -> value; the first pattern that matches a name gives its value."""

    def __init__(self, values: Mapping[str, float]) -> None:
        """The patterns must be without `pattern_fault`."""
        self._values = values
        self._entries = [_Entry.of(pattern, value) for pattern, value in values.items()]
        self._memo: dict[str, tuple[float, ...]] = {}

    def first(self, name: str, default: float) -> float:
        """The value of `name`. As PEFT: `pattern.get(get_pattern_key(pattern, name), default)`."""
        matching = self.matching(name)
        return matching[0] if matching else self._values.get(name, default)

    def matching(self, name: str) -> tuple[float, ...]:
        """The values of all patterns that match `name`, in order."""
        if name not in self._memo:
            self._memo[name] = tuple(entry.value for entry in self._entries if entry.matches(name))
        return self._memo[name]


@dataclass(frozen=True)
class _Entry:
    """A compiled pattern, and what its plain text says without matching: trainers may list every module of a model.

    tail: what any match ends with. num_chars: how long the matched end is, None if that varies.
    """

    regex: re.Pattern[str]
    value: float
    tail: str = ""
    num_chars: int | None = None

    @classmethod
    def of(cls, pattern: str, value: float) -> _Entry:
        regex = _end_pattern(pattern)
        if not _PLAIN.fullmatch(pattern):
            return cls(regex, value)
        plain = pattern.removeprefix("^")
        return cls(regex, value, tail=plain.rpartition(".")[2], num_chars=len(plain))

    def matches(self, name: str) -> bool:
        if not name.endswith(self.tail):
            return False
        if self.num_chars is not None and len(name) > self.num_chars and name[-self.num_chars - 1] != ".":
            return False
        return self.regex.match(name) is not None


def pattern_fault(pattern: str) -> str | None:
    """Why `pattern` is not run: it does not compile, or may take too long to match. None if it is fine."""
    if len(pattern) > MAX_PATTERN_CHARS:
        return f"a pattern of {len(pattern)} characters is too long (at most {MAX_PATTERN_CHARS})"
    if _REPEATED_GROUP.search(pattern) or _log10_steps(pattern) > MAX_LOG10_STEPS:
        return f"the pattern {pattern[:80]!r} may take very long to match; write it simpler"
    try:
        re.compile(pattern)  # alone too: "a)|(b" is a pattern only between PEFT's brackets
        _end_pattern(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"{pattern[:80]!r} is not a valid pattern: {error}"
    return None


def is_targeted(target_modules: Sequence[str] | str, name: str) -> bool:
    """Whether `target_modules` selects `name`: a string is a full match, a list matches whole or by its end.

    Same as `peft.tuners.tuners_utils.check_target_module_exists` without its layer restrictions.
    """
    if isinstance(target_modules, str):
        return target_modules == ALL_LINEAR or re.fullmatch(target_modules, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in target_modules)


def _end_pattern(pattern: str) -> re.Pattern[str]:
    """PEFT's reading of a pattern: it matches the whole name, or its end from a dot on."""
    return re.compile(rf"(.*\.)?({pattern})$")


def _log10_steps(pattern: str) -> float:
    """A rough upper bound on backtracking, without repeated groups: the product of all choices there are."""
    num_groups = pattern.count("(") + 1
    choices = num_groups * math.log10(1 + pattern.count("|") / num_groups)
    repeats = len(_REPEAT.findall(pattern)) * math.log10(MAX_NAME_CHARS)
    return choices + repeats + len(_OPTION.findall(pattern)) * math.log10(2)
