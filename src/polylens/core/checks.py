"""Checks of the values that requests have. Each raises RequestError, which names the value."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from polylens.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable


def check(ok: bool, param: str, value: object, wanted: str) -> None:
    if not ok:
        raise RequestError(f"{param} must be {wanted}, got {value!r:.200}", param=param)


def is_finite(value: float) -> bool:
    """Whether a float can hold `value`: an int of 400 digits cannot (`math.isfinite` raises OverflowError for it)."""
    return abs(value) <= sys.float_info.max


def check_integer(param: str, value: object, low: int) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= low
    check(ok, param, value, f"an integer of at least {low}")


def check_number(param: str, value: object, in_range: Callable[[float], bool], wanted: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value)
    check(is_number and in_range(value), param, value, f"a number, {wanted}")  # type: ignore[arg-type]
