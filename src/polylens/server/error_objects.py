"""Errors as OpenAI's clients know them: a status, and an object that says what is wrong and with which field."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse, Response

from polylens.errors import (
    AbortedError,
    AdapterConflictError,
    AdapterError,
    DeadlineError,
    InternalError,
    PolylensError,
    QueueFullError,
    RequestError,
    RowRuleError,
    ShuttingDownError,
    UnknownAdapterError,
)

RETRY_AFTER_S = 1
"""When to try again after a full queue: its head moves within a second or so."""

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that went away; nobody reads it but the log."""


class HTTPError(PolylensError):
    """An error that exists at the HTTP level only. headers: sent along."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers or {}


_STATUS: tuple[tuple[type[PolylensError], int, str | None], ...] = (
    (UnknownAdapterError, HTTPStatus.NOT_FOUND, "model_not_found"),
    (AdapterConflictError, HTTPStatus.BAD_REQUEST, "adapter_conflict"),
    (AdapterError, HTTPStatus.BAD_REQUEST, "bad_adapter"),
    (RequestError, HTTPStatus.BAD_REQUEST, None),
    (QueueFullError, HTTPStatus.TOO_MANY_REQUESTS, "queue_full"),
    (ShuttingDownError, HTTPStatus.SERVICE_UNAVAILABLE, "shutting_down"),
    (DeadlineError, HTTPStatus.GATEWAY_TIMEOUT, "deadline_exceeded"),
    (AbortedError, CLIENT_CLOSED_REQUEST, "aborted"),
    (RowRuleError, HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error"),
    (InternalError, HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error"),
)
"""Error class -> status and code; the first one that fits counts. None: no code, the message says it all."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def status_of(error: PolylensError) -> int:
    """The HTTP status an error is answered with."""
    return error.status if isinstance(error, HTTPError) else _status_and_code(error)[0]


def _status_and_code(error: PolylensError) -> tuple[int, str | None]:
    for kind, status, code in _STATUS:
        if isinstance(error, kind):
            return int(status), code
    return int(HTTPStatus.INTERNAL_SERVER_ERROR), "internal_error"


def error_object(error: PolylensError) -> dict[str, Any]:
    """OpenAI's `{"error": {"message", "type", "param", "code"}}`."""
    status, code = _status_and_code(error)
    param = "model" if isinstance(error, UnknownAdapterError) else getattr(error, "param", None)
    if isinstance(error, HTTPError):
        status, code = error.status, error.code
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def error_response(error: PolylensError) -> Response:
    """The answer to a request that an error ended."""
    status = status_of(error)
    headers = dict(error.headers) if isinstance(error, HTTPError) else {}
    if status in (429, 503):
        headers.setdefault("Retry-After", str(RETRY_AFTER_S))
    return JSONResponse(error_object(error), status_code=status, headers=headers)
