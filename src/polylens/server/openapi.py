"""The API's own description, made of the types that read it (OpenAPI 3.1)."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from polylens import __version__
from polylens.server.schema import Body, ChatBody, CompletionBody, LoadBody, TokenizeBody, UnloadBody

REF = "#/components/schemas/{model}"

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

_POSTS: tuple[tuple[str, type[Body], str, bool], ...] = (
    ("/v1/chat/completions", ChatBody, "Answer a conversation", True),
    ("/v1/completions", CompletionBody, "Go on from a prompt", True),
    ("/tokenize", TokenizeBody, "Token ids of a prompt or a conversation", False),
    ("/v1/load_lora_adapter", LoadBody, "Load an adapter (admin)", False),
    ("/v1/unload_lora_adapter", UnloadBody, "Unload an adapter (admin)", False),
)
"""Path, body, summary, and whether the answer can be a stream."""

_GETS = (
    ("/v1/models", "The base model and the adapters"),
    ("/health", "Whether the process is alive"),
    ("/ready", "Whether requests are taken"),
    ("/version", "The version"),
    ("/stats", "Queue, caches and adapters now"),
)

_ERROR_STATUSES = ("400", "401", "403", "404", "408", "413", "429", "500", "503", "504")


@cache
def describe_api() -> dict[str, Any]:
    """The OpenAPI document."""
    _, definitions = models_json_schema([(body, "validation") for _, body, _, _ in _POSTS], ref_template=REF)
    paths: dict[str, Any] = {}
    for path, body, summary, streams in _POSTS:
        paths[path] = {"post": _operation(summary, streams=streams, body=REF.format(model=body.__name__))}
    for path, summary in _GETS:
        paths[path] = {"get": _operation(summary)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "polylens", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**definitions.get("$defs", {}), "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(summary: str, *, streams: bool = False, body: str | None = None) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {
        "description": "An error",
        "content": {"application/json": {"schema": {"$ref": REF.format(model="Error")}}},
    }
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "The answer", "content": content}} | dict.fromkeys(_ERROR_STATUSES, error),
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": {"$ref": body}}}}
    return operation
