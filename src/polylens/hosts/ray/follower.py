"""How a replica keeps up with the book of adapters."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from polylens.errors import PolylensError
from polylens.hosts.ray.wire import answer_whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import ASGIApp

    from polylens.hosts.ray.book import Change, Key
    from polylens.hosts.ray.wire import Call

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Pause after the book could not be reached: it is being started anew."""

UNLOAD = "/v1/unload_lora_adapter"
NOT_FOUND = 404


class BookClient(Protocol):
    """The book as replicas reach it."""

    async def follow(self, replica: str, edition: str, number: int, *, serving: bool) -> list[Change] | None: ...

    async def restore(self, number: int, known: Mapping[Key, Change]) -> tuple[str, int]: ...


class Follower:
    """Does the book's changes through the replica's own application; holds up requests for names being changed."""

    def __init__(self, book: BookClient, replica: str, app: ASGIApp) -> None:
        self._book = book
        self._replica = replica
        self._app = app
        self._known: dict[Key, Change] = {}
        self._edition, self._number = "", 0
        self._serving = False
        self._closed: dict[str, asyncio.Event] = {}
        self.failure: PolylensError | None = None
        """The change this replica could not do although another could: it must not go on."""

    async def catch_up(self) -> None:
        """Do all changes there are. Raises what the book or a change raises."""
        while await self._turn():
            pass
        self._serving = True

    async def run(self) -> None:
        """Follow until cancelled, or until a change fails (see `failure`). Waits for a book that is away."""
        while self.failure is None:
            try:
                await self._turn()
            except PolylensError as error:
                self.failure = error
                log.error("this replica cannot follow and will be replaced: %s", error)
            except Exception as error:  # noqa: BLE001  (of Ray's many, each means that the book is not there now)
                log.warning("the book of adapters is away: %s", type(error).__name__)
                await asyncio.sleep(RETRY_S)

    async def pass_gate(self, adapter: str) -> None:
        """Wait while `adapter` is being changed."""
        while (gate := self._closed.get(adapter)) is not None:
            await gate.wait()

    async def _turn(self) -> bool:
        """Ask once, and do what comes; whether something came."""
        changes = await self._book.follow(self._replica, self._edition, self._number, serving=self._serving)
        if changes is None:
            self._edition, self._number = await self._book.restore(self._number, self._known)
            return True
        for change in changes:
            await self._do(change)
            self._known[change.key] = change
            self._number = change.number
        return bool(changes)

    async def _do(self, change: Change) -> None:
        if change.kind == "close":
            self._closed.setdefault(change.name, asyncio.Event())
        elif change.kind == "open":
            if gate := self._closed.pop(change.name, None):
                gate.set()
        elif change.call is not None:
            await self._call(change.call)

    async def _call(self, call: Call) -> None:
        head = await answer_whole(self._app, call)
        # What is to be forgotten may be forgotten already, or never have been here.
        if head.status >= 400 and not (call.path == UNLOAD and head.status == NOT_FOUND):
            raise PolylensError(f"a change of adapters failed here: {head.body.decode(errors='replace')[:500]}")
