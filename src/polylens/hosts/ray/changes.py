"""How a load or an unload is done by all replicas or by none."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from polylens.hosts.ray.follower import UNLOAD
from polylens.server.schema import MAX_NAME_CHARS

if TYPE_CHECKING:
    from polylens.hosts.ray.book import Book, Change, Key, Kind
    from polylens.hosts.ray.wire import Call, Head

log = logging.getLogger(__name__)

OK = 200


class Changes:
    """Changes of adapters, one after the other, through a book that replicas follow."""

    def __init__(self, book: Book, attempt: Callable[[Call], Awaitable[Head]]) -> None:
        """attempt: has one replica do it, and gives its answer. Belongs to the running loop."""
        self._book = book
        self._attempt = attempt
        self._turn = asyncio.Lock()
        self._taking_over = asyncio.ensure_future(self._take_over())

    async def follow(self, replica: str, edition: str, number: int, *, serving: bool) -> list[Change] | None:
        """As Book.follow."""
        return await self._book.follow(replica, edition, number, serving=serving)

    async def restore(self, number: int, known: Mapping[Key, Change]) -> tuple[str, int]:
        """As Book.restore."""
        found = await self._book.restore(number, known)
        if self._taking_over.done() and self._book.interrupted():  # of a replica that was away until now
            self._taking_over = asyncio.ensure_future(self._take_over())
        return found

    async def change(self, call: Call) -> Head:
        """Have it done; the answer of the first replica. Raises what `attempt` raises.

        Requests for the name that come meanwhile wait; those that run go on with what they have. It is finished also
        if whoever asks goes away.
        """
        return await asyncio.shield(self._change(call))

    async def _change(self, call: Call) -> Head:
        await self._taking_over
        async with self._turn:
            name = name_of(call)
            if not name:
                return await self._attempt(call)
            await self._all_do(name, "close", call)
            try:
                head = await self._attempt(call)
                if head.status == OK:
                    await self._all_do(name, "content", call)
                return head
            finally:
                await self._all_do(name, "open")

    async def _take_over(self) -> None:
        """Do again what was begun with the book before this one: some replicas may have done it, and others not."""
        await self._book.opened()
        async with self._turn:
            for change in self._book.interrupted():
                log.warning("a change of an adapter was interrupted; it is done again")
                if change.call is not None and await self._is_possible(change.call):
                    await self._all_do(change.name, "content", change.call)
                await self._all_do(change.name, "open")

    async def _is_possible(self, call: Call) -> bool:
        if call.path == UNLOAD:  # the one that is asked has perhaps done it already
            return True
        try:
            return (await self._attempt(call)).status == OK
        except Exception:
            log.exception("the change is given up")
            return False

    async def _all_do(self, name: str, kind: Kind, call: Call | None = None) -> None:
        await self._book.done(await self._book.write(name, kind, call))


def name_of(call: Call) -> str:
    """The name that a load or unload is about; "" where its body is wrong, which the replica's answer tells."""
    try:
        body = json.loads(call.body)
    except (ValueError, RecursionError):
        return ""
    name = body.get("lora_name") if isinstance(body, dict) else None
    return name if isinstance(name, str) and len(name) <= MAX_NAME_CHARS else ""
