"""From submitted requests to the response: whole, or piece by piece as it comes."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response

from polylens.core import Completion, CompletionDelta
from polylens.errors import AbortedError, InternalError, PolylensError
from polylens.server.error_objects import error_object, status_of
from polylens.server.events import DONE, EventStream, aborting, event, unless_disconnected

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from starlette.requests import Request

    from polylens.engine.handle import RequestHandle
    from polylens.server.intake import Asked
    from polylens.server.metrics import Metrics

log = logging.getLogger(__name__)


class Generation:
    """The choices of one answer, each a request of the engine's. handles: of all that is asked, as submitted."""

    def __init__(self, handles: Sequence[RequestHandle], asked: Asked, metrics: Metrics) -> None:
        self._handles = handles
        self._answer = asked.answer_of(handles)
        self._metrics = metrics
        self._num_prompts = len(asked.requests)
        self._stream = asked.stream
        self._include_usage = asked.include_usage
        self._completions: dict[int, Completion] = {}
        self._ends: dict[int, int] = {}

    async def respond(self, request: Request) -> Response:
        """The response. Raises the error that ended a choice, as far as the response has not begun."""
        if self._stream:
            return await self._streamed(request)
        try:
            async with aborting(self._handles):
                work = asyncio.gather(*(self._finish(index) for index in range(len(self._handles))))
                await unless_disconnected(request.receive, work)
        finally:
            self._note_ends()
        return JSONResponse(self._answer.whole(self._in_order(), self._num_prompts))

    async def _streamed(self, request: Request) -> Response:
        try:
            await unless_disconnected(request.receive, asyncio.gather(*(handle.queued() for handle in self._handles)))
        except BaseException as error:
            for index, handle in enumerate(self._handles):
                handle.abort()
                self._ends[index] = status_of(error) if isinstance(error, PolylensError) else 499
            self._note_ends()
            raise
        stream = EventStream(self._events(), self._handles)
        stream.at_end(self._note_ends)
        return stream

    async def _finish(self, index: int) -> None:
        async for _ in self._deltas(index):
            pass

    async def _deltas(self, index: int) -> AsyncIterator[CompletionDelta]:
        """A choice's deltas, noted as they pass."""
        handle = self._handles[index]
        last: float | None = None
        try:
            async for delta in handle:
                now = time.monotonic()
                if last is not None:
                    self._metrics.observe_gap(handle.request.adapter, now - last)
                last = now
                if delta.completion is not None:
                    self._completions[index] = delta.completion
                    self._ends[index] = 200
                yield delta
        except PolylensError as error:
            self._ends[index] = status_of(error)
            raise

    # ---- the stream

    async def _events(self) -> AsyncGenerator[bytes]:
        for index in range(len(self._handles)):
            if self._answer.kind == "chat":
                yield self._event(self._answer.piece(index, "", first=True))
        lengths = [0] * len(self._handles)
        try:
            async for index, delta in self._merged():
                for piece in self._pieces(index, delta, lengths[index]):
                    yield self._event(piece)
                lengths[index] += len(delta.text)
        except PolylensError as error:
            yield event(error_object(error))
            yield DONE
            return
        if self._include_usage:
            yield event(self._answer.usage_piece(self._in_order(), self._num_prompts))
        yield DONE

    def _event(self, piece: dict[str, Any]) -> bytes:
        return event({**piece, "usage": None} if self._include_usage else piece)

    def _pieces(self, index: int, delta: CompletionDelta, offset: int) -> list[dict[str, Any]]:
        pieces = []
        if delta.text or delta.logprobs is not None:
            pieces.append(self._answer.piece(index, delta.text, logprobs=delta.logprobs, offset=offset))
        if delta.completion is not None:
            pieces.append(self._answer.piece(index, "", completion=delta.completion))
        return pieces

    async def _merged(self) -> AsyncIterator[tuple[int, CompletionDelta]]:
        """The deltas of all choices as they come. The first error ends them all."""
        events: asyncio.Queue[tuple[int, CompletionDelta | PolylensError | None]] = asyncio.Queue()

        async def pump(index: int) -> None:
            try:
                async for delta in self._deltas(index):
                    events.put_nowait((index, delta))
                events.put_nowait((index, None))
            except PolylensError as error:
                events.put_nowait((index, error))

        pumps = [asyncio.ensure_future(pump(index)) for index in range(len(self._handles))]
        try:
            num_open = len(pumps)
            while num_open:
                index, item = await events.get()
                if isinstance(item, PolylensError):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield index, item
        finally:
            for task in pumps:
                task.cancel()

    # ---- the end

    def _in_order(self) -> list[Completion]:
        if len(self._completions) != len(self._handles):
            raise InternalError(f"{self._answer.id}: an answer has choices that did not end")
        return [self._completions[index] for index in range(len(self._handles))]

    def _note_ends(self) -> None:
        """Count how every choice ended. One that nobody waited for was aborted."""
        aborted = status_of(AbortedError(""))
        for index, handle in enumerate(self._handles):
            status = self._ends.get(index, aborted)
            self._metrics.observe_end(handle.request.adapter, handle.times, status)
            completion = self._completions.get(index)
            log.info(
                "%s model=%s adapter=%s status=%d prompt_tokens=%s tokens=%s",
                handle.request_id,
                self._answer.model,
                handle.request.adapter,
                status,
                handle.prompt_tokens,
                len(completion.token_ids) if completion is not None else None,
            )
