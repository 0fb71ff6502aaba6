"""What the engine's thread has to tell to requests, collected by the loop that each of them came from."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polylens.engine.handle import Event, RequestHandle


class Outbox:
    """Used by the engine's thread only."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestHandle, Event]]] = defaultdict(list)

    def put(self, handle: RequestHandle, event: Event) -> None:
        """Have `event` for `handle` handed out at the next `flush`."""
        self._by_loop[handle.loop].append((handle, event))

    def flush(self) -> list[RequestHandle]:
        """Hand everything out, one call a loop. Returns the handles whose loop is closed: nobody reads them."""
        by_loop, self._by_loop = self._by_loop, defaultdict(list)
        unread: list[RequestHandle] = []
        for loop, events in by_loop.items():
            try:
                loop.call_soon_threadsafe(_hand_out, events)
            except RuntimeError:
                unread += [handle for handle, _ in events]
        return unread

    def drop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Forget what waits for a loop that is closed."""
        self._by_loop.pop(loop, None)


def _hand_out(events: Sequence[tuple[RequestHandle, Event]]) -> None:
    for handle, event in events:
        handle.receive(event)
