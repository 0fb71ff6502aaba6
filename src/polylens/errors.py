"""The error tree. Every error a user can cause is a `PolylensError` with one clear message.

The message names what is wrong and what to do. Commands print it as one line and exit with code 2;
a server maps the classes to HTTP statuses. `assert` is for our own bugs only.
"""

from __future__ import annotations


class PolylensError(Exception):
    """Base of all errors that wrong input or an unmet condition can cause."""


class ModelLoadError(PolylensError):
    """A base model cannot be loaded, or is of a kind polylens does not serve."""


class AdapterError(PolylensError):
    """Something about an adapter is wrong; nothing of it has been loaded."""


class AdapterFormatError(AdapterError):
    """The adapter's files are missing, truncated or malformed."""


class AdapterUnsupportedError(AdapterError):
    """The adapter uses an option polylens does not apply; `option` names it."""

    def __init__(self, message: str, option: str) -> None:
        super().__init__(message)
        self.option = option


class AdapterMismatchError(AdapterError):
    """The adapter is well formed but does not fit the loaded model.

    `problems` holds one line for every tensor that does not fit.
    """

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems


class AdapterConflictError(AdapterError):
    """The name is taken by an adapter with other content and `replace` was not asked for."""


class UnknownAdapterError(AdapterError):
    """A request names an adapter that is not loaded; it never falls back to the base model."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        listed = ", ".join(sorted(known)) if known else "none"
        super().__init__(f"unknown adapter {name!r}; loaded adapters: {listed}")
        self.name = name
        self.known = known


class RequestError(PolylensError):
    """A request cannot be served as it is written; `param` names the field when there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class MediaError(RequestError):
    """A picture or video cannot be read, or is beyond a limit."""


class PromptTooLongError(RequestError):
    """The prompt, or prompt plus `max_tokens`, does not fit the context or the memory plan."""


class QueueFullError(PolylensError):
    """Too many requests wait already; nothing of this one was done, so it may be sent again later."""


class ShuttingDownError(PolylensError):
    """The engine takes no new requests, or ended this one, because it is being stopped."""


class DeadlineError(PolylensError):
    """A request was not done within its deadline and has been ended."""


class AbortedError(PolylensError):
    """A request was aborted by whoever sent it."""


class RowRuleError(PolylensError):
    """A layer was called with a number of rows its row rule does not explain.

    Raised before the layer's result is used: rows are never given to the wrong adapter.
    """


class InternalError(PolylensError):
    """An invariant of polylens does not hold; please report it."""


class EngineFailedError(InternalError):
    """The engine's thread ended with an error: it answers nothing any more until it is started anew."""


MAX_LINE_CHARS = 300
"""Shown of what another library says: some put a whole file into their message."""


def first_line(error: BaseException) -> str:
    """What an exception of another library says, as one line; its type where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:MAX_LINE_CHARS] if lines else type(error).__name__
