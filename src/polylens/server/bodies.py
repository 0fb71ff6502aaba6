"""Receive the bodies of requests, within a size, a time and a total."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from polylens.server.error_objects import HTTPError
from polylens.server.options import BODY_TIMEOUT_S, MAX_BODIES_BYTES

if TYPE_CHECKING:
    from contextlib import ExitStack

    from starlette.requests import Request

T = TypeVar("T")

LARGE_BODY_BYTES = 1 << 16
"""Bodies above this size are read off the loop: a picture's base64 takes milliseconds."""


async def off_loop_if_large(read: Callable[[bytes], T], body: bytes) -> T:
    """What `read` makes of the body, in a thread of its own if that takes long."""
    return read(body) if len(body) < LARGE_BODY_BYTES else await asyncio.to_thread(read, body)


class BodyReader:
    """max_bytes: of one body; larger ones are refused with 413 before they are received in full."""

    def __init__(self, max_bytes: int, max_total_bytes: int = MAX_BODIES_BYTES) -> None:
        self._max_bytes = max_bytes
        self._max_total_bytes = max(max_total_bytes, max_bytes)
        self.num_bytes = 0
        """Of all bodies held now."""

    async def receive(self, request: Request, holding: ExitStack) -> bytes:
        """The body, which counts as held until `holding` is closed. Raises HTTPError 408, 413, 503."""
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            raise self._too_large()
        pieces: list[bytes] = []
        try:
            await self._receive(request, pieces)
        finally:
            holding.callback(self._release, sum(map(len, pieces)))
        return b"".join(pieces)

    def _release(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes

    async def _receive(self, request: Request, pieces: list[bytes]) -> None:
        held = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for piece in request.stream():
                    pieces.append(piece)
                    held += len(piece)
                    self.num_bytes += len(piece)
                    self._check(held)
        except TimeoutError as error:
            raise HTTPError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error

    def _check(self, held: int) -> None:
        if held > self._max_bytes:
            raise self._too_large()
        if self.num_bytes > self._max_total_bytes:
            raise HTTPError(503, "too many large requests at once; try again later", code="overloaded")

    def _too_large(self) -> HTTPError:
        return HTTPError(413, f"the body is larger than {self._max_bytes} bytes", code="body_too_large")
