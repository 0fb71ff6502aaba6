"""The deployment that keeps the book of adapters, and carries out changes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ray import serve

from polylens.hosts.ray.book import Book
from polylens.hosts.ray.changes import Changes
from polylens.hosts.ray.loopback import stay_on_loopback
from polylens.hosts.ray.losses import ATTEMPTS, LOST, ReplicaUnfitError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polylens.hosts.ray.book import Change, Key
    from polylens.hosts.ray.wire import Call, Head

log = logging.getLogger(__name__)


class Desk:
    """One of it runs."""

    async def __init__(self, engine: str) -> None:  # type: ignore[misc]  # Ray awaits it: the book belongs to its loop
        """engine: name of the replicas' deployment, which itself is given this one and so cannot be given to it."""
        stay_on_loopback()
        self._engine_name = engine
        self._engine: Any = None
        self._changes = Changes(Book(), self._attempt)

    async def follow(self, replica: str, edition: str, number: int, *, serving: bool) -> list[Change] | None:
        return await self._changes.follow(replica, edition, number, serving=serving)

    async def restore(self, number: int, known: Mapping[Key, Change]) -> tuple[str, int]:
        return await self._changes.restore(number, known)

    async def change(self, call: Call) -> Head:
        return await self._changes.change(call)

    async def _attempt(self, call: Call) -> Head:
        """One replica does it first, and says what is wrong with it. Raises ReplicaUnfitError if too many are lost."""
        for _ in range(ATTEMPTS):
            try:
                pieces = [piece async for piece in self._replicas().answer.remote(call)]
            except LOST as error:
                log.warning("a replica was lost changing an adapter, asking another: %s", type(error).__name__)
            else:
                head: Head = pieces[0]
                return head
        raise ReplicaUnfitError(f"{ATTEMPTS} replicas were lost")

    def _replicas(self) -> Any:
        if self._engine is None:  # made once: each handle follows the replicas by itself
            handle = serve.get_deployment_handle(self._engine_name, serve.get_replica_context().app_name)
            self._engine = handle.options(stream=True)
        return self._engine
