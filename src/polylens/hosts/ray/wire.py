"""A request to a replica's application without a socket: what goes there and what comes back, in pieces."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polylens.errors import InternalError
from polylens.hosts.ray.affinity import NOTHING, Affinity

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, MutableMapping

    from starlette.requests import Request
    from starlette.types import ASGIApp

    Messages = asyncio.Queue[MutableMapping[str, Any] | None]

Headers = tuple[tuple[bytes, bytes], ...]

EVENT_STREAM = b"text/event-stream"

PASSED_ON = frozenset({b"content-type", b"accept"})
"""Request headers that replicas see: keys and cookies end at the ingress."""


@dataclass(frozen=True)
class Call:
    """A request. affinity: what it shares with others, as far as the ingress can tell."""

    method: str
    path: str
    query: bytes = b""
    headers: Headers = ()
    body: bytes = b""
    affinity: Affinity = NOTHING


@dataclass(frozen=True)
class Head:
    """The first piece of an answer: status, headers, and as much of the body as there was. whole: that is all of it."""

    status: int
    headers: Headers
    body: bytes
    whole: bool

    @property
    def streams(self) -> bool:
        """Whether the body is server-sent events."""
        return any(name == b"content-type" and value.startswith(EVENT_STREAM) for name, value in self.headers)


def call_of(request: Request, body: bytes, affinity: Affinity = NOTHING) -> Call:
    """The call that passes a request on."""
    headers = tuple((name, value) for name, value in request.headers.raw if name in PASSED_ON)
    path, query = request.scope["path"], request.scope.get("query_string", b"")
    return Call(request.method, path, query, headers, body, affinity)


class EndedEarlyError(InternalError):
    """An application returned in the middle of its answer."""


async def answer(app: ASGIApp, call: Call) -> AsyncGenerator[Head | bytes]:
    """What `app` answers, first a Head. Closing the generator is the client going away.

    Of an event stream, nothing is given before an event has something to say: until then the request can still be
    answered by another replica. Raises what the application raises in the middle of its answer.
    """
    sent: Messages = asyncio.Queue()
    task = asyncio.ensure_future(_run(app, call, sent))
    try:
        start = await _message(sent)
        pieces = _pieces(sent)
        yield await _head(start, pieces)
        async for piece in pieces:
            yield piece
    except EndedEarlyError:
        await task  # which says why
        raise
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # an error after a whole answer is in the log already


async def answer_whole(app: ASGIApp, call: Call) -> Head:
    """The answer of `app` to a call that is not answered with a stream. Raises what `answer` raises."""
    async with aclosing(answer(app, call)) as pieces:
        async for piece in pieces:
            if isinstance(piece, Head) and piece.whole:
                return piece
    raise InternalError(f"{call.path} was answered with a stream")


async def _run(app: ASGIApp, call: Call, sent: Messages) -> None:
    given = iter([{"type": "http.request", "body": call.body, "more_body": False}])
    never = asyncio.Event()

    async def receive() -> MutableMapping[str, Any]:
        message = next(given, None)
        if message is None:
            await never.wait()  # a client that goes away cancels the task
        return message or {"type": "http.disconnect"}

    try:
        await app(_scope(call), receive, sent.put)
    finally:
        sent.put_nowait(None)


def _scope(call: Call) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query,
        "root_path": "",
        "headers": [*call.headers, (b"content-length", str(len(call.body)).encode())],
        "client": None,
        "server": None,
    }


async def _message(sent: Messages) -> MutableMapping[str, Any]:
    message = await sent.get()
    if message is None:
        raise EndedEarlyError("the application ended in the middle of an answer")
    return message


async def _pieces(sent: Messages) -> AsyncGenerator[bytes]:
    """The body: as much in a piece as is there, because every piece costs a round."""
    more = True
    while more:
        bodies: list[bytes] = []
        while more and (not bodies or not sent.empty()):
            message = await _message(sent)
            bodies.append(message.get("body", b""))
            more = message.get("more_body", False)
        if body := b"".join(bodies):
            yield body


async def _head(start: MutableMapping[str, Any], pieces: AsyncIterator[bytes]) -> Head:
    headers = tuple((bytes(name), bytes(value)) for name, value in start["headers"])
    head = Head(start["status"], headers, b"", whole=False)
    body = b""
    async for piece in pieces:
        body += piece
        if head.streams and says_something(body):
            return dataclasses.replace(head, body=body)
    return dataclasses.replace(head, body=body, whole=True)


def says_something(events: bytes) -> bool:
    """Whether any of whole server-sent events has text, an end, an error or a usage: more than that it began."""
    lines = (line.removeprefix(b"data: ") for line in events.splitlines() if line.startswith(b"data: "))
    return any(line == b"[DONE]" or _has_content(json.loads(line)) for line in lines)


def _has_content(event: dict[str, Any]) -> bool:
    choices = event.get("choices")
    return not choices or any(
        choice.get("finish_reason") or choice.get("text") or choice.get("delta", {}).get("content")
        for choice in choices
    )
