"""API keys: who may use the API, and who may change what it serves."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

from starlette.requests import Request

from polylens.server.error_objects import HTTPError, error_response

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version", "/openapi.json"})
"""Paths that tell nothing about requests or adapters. `/` is the page: a form without content, which asks for a
key itself, as browsers cannot send one with a page."""

OPEN_PREFIX = "/page/"
"""The page's script and style."""

ADMIN_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})


class Keys:
    """A set of keys, compared in a time that does not depend on how much of a guess is right."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __contains__(self, key: str) -> bool:
        given = _digest(key)
        found = False
        for digest in self._digests:  # all of them, always
            found |= hmac.compare_digest(digest, given)
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class KeyCheck:
    """ASGI middleware that asks for `Authorization: Bearer KEY` where keys are set.

    An admin key opens everything; where only API keys exist, nobody may load or unload.
    """

    def __init__(self, app: ASGIApp, api_keys: Collection[str], admin_keys: Collection[str]) -> None:
        self._app = app
        self._user = Keys([*api_keys, *admin_keys])
        self._admin = Keys(admin_keys)
        self._closed = bool(api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS":
            error = self._refusal(scope["path"], Request(scope))
            if error is not None:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, path: str, request: Request) -> HTTPError | None:
        if path in OPEN_PATHS or path.startswith(OPEN_PREFIX):
            return None
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        if path in ADMIN_PATHS and (self._admin or self._closed):
            if key in self._admin:
                return None
            if key in self._user:
                return HTTPError(403, "this needs an admin key (--admin-api-key)", code="admin_key_required")
            return _unauthorized(key)
        if self._closed and key not in self._user:
            return _unauthorized(key)
        return None


def _unauthorized(key: str) -> HTTPError:
    message = "the API key is wrong" if key else "an API key is needed: send 'Authorization: Bearer KEY'"
    return HTTPError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
