"""What a caller on an asyncio loop holds of a request that runs on the engine's thread."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polylens.core import Completion, CompletionDelta
from polylens.errors import InternalError, PolylensError

if TYPE_CHECKING:
    from collections.abc import Callable

    from polylens.core import Request
    from polylens.engine.adapter_lease import StoreLease
    from polylens.models.processing import Processing


@dataclass
class RequestTimes:
    """When a request reached each stage, in seconds of `time.monotonic`; None: not yet.

    submitted: taken in. queued: prepared, waits for the scheduler. admitted: its first step began. first_token,
    ended: as they say, measured on the engine's thread.
    """

    submitted: float
    queued: float | None = None
    admitted: float | None = None
    first_token: float | None = None
    ended: float | None = None


class Queued:
    """The event that a request is prepared and waits for the scheduler."""


Event = Queued | CompletionDelta | PolylensError
"""What the engine's thread tells a handle; a delta with a completion, and an error, are the last one."""


class RequestHandle:
    """One submitted request: iterate it for `CompletionDelta`s, the last of which holds the `Completion`.

    The error that ends a request is raised by the iteration (and by `queued`). As a context manager it aborts
    what is unfinished on leaving. To be used on the loop it was submitted from, by one consumer.

        async with engine.submit(request) as handle:
            async for delta in handle: ...
    """

    def __init__(
        self,
        request_id: str,
        request: Request,
        lease: StoreLease,
        times: RequestTimes,
        deadline: float | None,
        abort: Callable[[RequestHandle], None],
    ) -> None:
        """deadline: in seconds of `time.monotonic`. abort: asks the engine's thread to end the request."""
        self.request_id = request_id
        self.request = request
        self.times = times
        self.prompt_tokens: int | None = None
        """Tokens of the prompt, once `queued` has returned."""
        self.processing: Processing | None = None
        """How its tokens are to be read, from the same moment."""
        self.lease = lease
        self.deadline = deadline
        self.loop = asyncio.get_running_loop()
        self._abort = abort
        self._events: asyncio.Queue[CompletionDelta | PolylensError] = asyncio.Queue()
        self._queued = asyncio.Event()
        self._error: PolylensError | None = None
        self._ended = False

    async def queued(self) -> None:
        """Wait until the request is prepared and queued; raises what is wrong with it.

        After this a server may begin its answer: only deadlines, aborts and failures can end the request now.
        """
        await self._queued.wait()
        if self._error is not None:
            raise self._error

    async def completion(self) -> Completion:
        """Wait for the whole answer, passing over its pieces."""
        async for delta in self:
            if delta.completion is not None:
                return delta.completion
        raise InternalError(f"{self.request_id}: its answer has been read already")

    def token_text(self, token_id: int) -> str:
        """One token of the answer as text, for log probabilities."""
        if self.processing is None:
            raise InternalError(f"{self.request_id}: asked for its tokens' text before it was prepared")
        return str(self.processing.tokenizer.decode([token_id]))

    def abort(self) -> None:
        """End the request; what it holds is free within one step. Nothing happens if it has ended already."""
        self._abort(self)

    def receive(self, event: Event) -> None:
        """Take an event in; called on the handle's loop by the engine's thread."""
        if isinstance(event, PolylensError):
            self._error = event
        if not isinstance(event, Queued):
            self._events.put_nowait(event)
        self._queued.set()

    def __aiter__(self) -> RequestHandle:
        return self

    async def __anext__(self) -> CompletionDelta:
        if self._ended:
            raise StopAsyncIteration
        event = await self._events.get()
        if isinstance(event, PolylensError):
            self._ended = True
            raise event
        self._ended = event.completion is not None
        return event

    async def __aenter__(self) -> RequestHandle:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.abort()
