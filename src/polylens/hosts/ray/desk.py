"""The deployment that keeps the book of adapters, and carries out changes."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from ray import serve

from polylens.hosts.ray.book import Book
from polylens.hosts.ray.loopback import stay_on_loopback

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polylens.hosts.ray.book import Change, Key
    from polylens.hosts.ray.wire import Call, Head

OK = 200


class Desk:
    """One of it runs. Changes come one after the other."""

    async def __init__(self, engine: str) -> None:  # type: ignore[misc]  # Ray awaits it: the book belongs to its loop
        """engine: name of the replicas' deployment, which itself is given this one and so cannot be given to it."""
        stay_on_loopback()
        self._engine_name = engine
        self._engine: Any = None
        self._book = Book()
        self._turn = asyncio.Lock()

    async def follow(self, replica: str, number: int) -> list[Change] | None:
        return await self._book.follow(replica, number)

    async def restore(self, known: Mapping[Key, Change]) -> None:
        await self._book.restore(known)

    async def change(self, call: Call) -> Head:
        """Have a load or an unload done by all replicas, or by none; the answer of the first one.

        Requests for the name that come meanwhile wait; those that run go on with what they have.
        """
        await self._book.opened()
        async with self._turn:
            return await asyncio.shield(self._change(call))

    async def _change(self, call: Call) -> Head:
        name = name_of(call)
        if not name:
            return await self._try(call)
        await self._all_do(name, None, closed=True)
        try:
            head = await self._try(call)
            if head.status == OK:
                await self._all_do(name, call)
            return head
        finally:
            await self._all_do(name, None)

    async def _all_do(self, name: str, call: Call | None, *, closed: bool = False) -> None:
        await self._book.done(await self._book.write(name, call, closed=closed))

    async def _try(self, call: Call) -> Head:
        """One replica does it first, and says what is wrong with it."""
        if self._engine is None:  # made once: each handle follows the replicas by itself
            handle = serve.get_deployment_handle(self._engine_name, serve.get_replica_context().app_name)
            self._engine = handle.options(stream=True)
        pieces = [piece async for piece in self._engine.answer.remote(call)]
        head: Head = pieces[0]
        return head


def name_of(call: Call) -> str:
    """The name that a load or unload is about; "" where its body is wrong, which the replica's answer tells."""
    try:
        body = json.loads(call.body)
    except (ValueError, RecursionError):
        return ""
    name = body.get("lora_name") if isinstance(body, dict) else None
    return name if isinstance(name, str) else ""
