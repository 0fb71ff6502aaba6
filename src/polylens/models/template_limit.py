"""A time limit for rendering a chat template that came with an adapter.

Jinja's sandbox bounds what a template can reach, not how long it runs, and a thread cannot be stopped from outside.
So the thread that renders looks at the clock itself, at each line of the template.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jinja2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_TEMPLATE_FILE = "<template>"
"""What Jinja names the code of a template that was no file."""


class TemplateTimeoutError(jinja2.TemplateError):
    """The template was not done in time."""


@contextmanager
def template_limit(limit_s: float | None) -> Iterator[None]:
    """Raise TemplateTimeoutError in Jinja templates that run longer than `limit_s` on this thread; None: no limit.

    Seconds count from the first line of a template; what runs before and between templates is not slowed by much.
    A debugger's own tracing of this thread rests meanwhile.
    """
    if limit_s is None:
        yield
        return
    clock = _Clock(limit_s)
    before = sys.gettrace()
    sys.settrace(clock.on_call)
    try:
        yield
    finally:
        sys.settrace(before)


class _Clock:
    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._deadline: float | None = None

    def on_call(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        if frame.f_code.co_filename != _TEMPLATE_FILE:
            return None
        if self._deadline is None:
            self._deadline = time.monotonic() + self._limit_s
        return self._on_line

    def _on_line(self, _frame: FrameType, _event: str, _argument: Any) -> Any:
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise TemplateTimeoutError(f"it runs longer than {self._limit_s:g} s")
        return self._on_line
