"""The ASGI application: paths to methods of the service, errors to OpenAI's error objects."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from polylens.errors import InternalError, PolylensError
from polylens.server.auth import KeyCheck
from polylens.server.error_objects import CLIENT_CLOSED_REQUEST, HTTPError, error_response, status_of
from polylens.server.openapi import describe_api

if TYPE_CHECKING:
    from polylens.server.service import Service

log = logging.getLogger(__name__)

PAGE = Path(__file__).parent / "page"


def build_app(service: Service) -> Starlette:
    """The application over a service whose engine runs."""
    options = service.options
    routes = [
        *(Route(path, getattr(service, name), methods=[method]) for path, method, name in ENDPOINTS),
        Route("/openapi.json", _openapi, methods=["GET"]),
        Route("/", _page, methods=["GET"]),
        Mount("/page", StaticFiles(directory=PAGE)),
    ]
    middleware = [Middleware(KeyCheck, api_keys=options.api_keys, admin_keys=options.admin_keys)]
    if options.cors_origins:
        cors = Middleware(CORSMiddleware, allow_origins=options.cors_origins, allow_methods=["*"], allow_headers=["*"])
        middleware.insert(0, cors)
    handlers = {
        PolylensError: _known(service),
        ClientDisconnect: _gone,
        HTTPException: _http,
        Exception: _unknown,
    }
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)  # type: ignore[arg-type]


ENDPOINTS = (
    ("/v1/chat/completions", "POST", "chat"),
    ("/v1/completions", "POST", "complete"),
    ("/v1/models", "GET", "models"),
    ("/v1/models/{name:path}", "GET", "model"),
    ("/v1/load_lora_adapter", "POST", "load_adapter"),
    ("/v1/unload_lora_adapter", "POST", "unload_adapter"),
    ("/tokenize", "POST", "tokenize"),
    ("/health", "GET", "health"),
    ("/ready", "GET", "ready"),
    ("/version", "GET", "version"),
    ("/metrics", "GET", "metrics_text"),
    ("/stats", "GET", "stats"),
)
"""Path, method, and the service's method that answers."""

PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src blob: data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""The page loads nothing from other hosts and runs no script but its own."""


async def _page(_request: Request) -> Response:
    return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)


async def _openapi(_request: Request) -> Response:
    return JSONResponse(describe_api())


def _known(service: Service) -> Callable[[Request, PolylensError], Awaitable[Response]]:
    async def answer(request: Request, error: PolylensError) -> Response:
        status = status_of(error)
        service.metrics.observe_error(status)
        if status >= 500 and isinstance(error, InternalError):
            log.error("%s %s: %s", request.method, request.url.path, error, exc_info=error)
        return error_response(error)

    return answer


async def _gone(_request: Request, _error: ClientDisconnect) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)  # nobody reads it


async def _http(_request: Request, error: HTTPException) -> Response:
    texts = {404: "there is nothing at this path", 405: "this path does not take this method"}
    headers = dict(error.headers or {})
    return error_response(HTTPError(error.status_code, texts.get(error.status_code, error.detail), headers=headers))


async def _unknown(request: Request, error: Exception) -> Response:
    """A bug of ours: the client hears that much, the log has the rest (Starlette raises it again for uvicorn)."""
    log.error("%s %s failed", request.method, request.url.path)
    return error_response(InternalError(f"internal error ({type(error).__name__}); it has been logged"))
