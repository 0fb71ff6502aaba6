"""Answers as server-sent events, and the watch for clients that go away."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import Response

from polylens.errors import AbortedError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence

    from starlette.types import Receive, Scope, Send

    from polylens.engine.handle import RequestHandle

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """What `work` gives; it is cancelled, and AbortedError raised, when the client goes away before.

    The request's body must have been received in full.
    """
    watch = asyncio.ensure_future(_disconnect(receive))
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({watch, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise AbortedError("the client went away")
    finally:
        await _cancel(watch, task)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def aborting(handles: Sequence[RequestHandle]) -> AsyncIterator[Sequence[RequestHandle]]:
    """Whatever ends the block, none of the requests goes on."""
    try:
        yield handles
    finally:
        for handle in handles:
            handle.abort()


class EventStream(Response):
    """Streams events; when the client goes away, even between two events, the source is closed at once."""

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[bytes], handles: Sequence[RequestHandle]) -> None:
        """handles: aborted when the stream ends, however it does."""
        # Proxies (nginx) would collect the events into buffers otherwise.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._source = source
        self._handles = handles
        self._ends: list[Callable[[], None]] = []

    def at_end(self, call: Callable[[], None]) -> None:
        """Have something done when the stream has ended, however it does."""
        self._ends.append(call)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aborting(self._handles):
                await unless_disconnected(receive, self._write(send))
        except AbortedError:
            return  # nobody is left to answer
        finally:
            for call in self._ends:
                call()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._source) as source:
            async for piece in source:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
