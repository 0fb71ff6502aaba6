"""Which adapters all replicas have: changes in one order, and how replicas come to agree on them.

The book numbers the changes. Every replica follows it: asks for what is newer than what it has, does that, and asks
again, which says that it has done it. A change counts as done when every replica that was heard of lately has done
it, so that no request after the answer meets the old content. A replica that starts follows from 0 before it takes
requests. What is kept is the newest change of each name, not the history.

A book that is started anew knows nothing; what it knew is in the replicas, which give it back. Until they had time to,
it takes no changes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from polylens.hosts.ray.wire import Call

POLL_S = 2.0
"""Longest time a replica waits for a change before it asks again, which is also its sign of life."""

SILENCE_S = 10.0
"""A replica not heard of for so long is gone, and not waited for: several polls, and a stalled interpreter."""

Key = tuple[str, Literal["content", "gate"]]


@dataclass(frozen=True)
class Change:
    """What a name means from now on. call: the load or unload that makes it so; None opens or closes the gate.

    closed: new requests for the name wait until the gate is opened, so that none begins with the new content where
    another still begins with the old.
    """

    number: int
    name: str
    call: Call | None
    closed: bool = False

    @property
    def key(self) -> Key:
        return self.name, "gate" if self.call is None else "content"


class Book:
    """See the module's text. Belongs to one loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._opens_at = clock() + 2 * POLL_S
        self._newest: dict[Key, Change] = {}
        self._number = 0
        self._heard: dict[str, tuple[int, float]] = {}
        """Replica -> the change it has come to, and when it said so."""
        self._news = asyncio.Condition()

    @property
    def number(self) -> int:
        """Of the last change."""
        return self._number

    def since(self, number: int) -> list[Change]:
        """The changes after `number`, in order."""
        return sorted((one for one in self._newest.values() if one.number > number), key=lambda one: one.number)

    async def follow(self, replica: str, number: int) -> list[Change] | None:
        """`replica` has done everything up to `number`: what comes next, after POLL_S at the latest, or nothing.

        None: the book is behind, and must be given what the replica knows (`restore`).
        """
        if number > self._number:
            return None
        async with self._news:
            self._heard[replica] = number, self._clock()
            self._news.notify_all()
            if number == self._number:
                await self._wait(lambda: number < self._number, POLL_S)
            return self.since(number)

    def leave(self, replica: str) -> None:
        """`replica` is being stopped: it is not waited for any more."""
        self._heard.pop(replica, None)

    async def restore(self, known: Mapping[Key, Change]) -> None:
        """Take over what a replica knows, if that is more. Gates that a lost change left closed are opened."""
        newest = max((change.number for change in known.values()), default=0)
        if newest <= self._number:
            return
        self._newest, self._number = dict(known), newest
        for change in self.since(0):
            if change.closed:
                await self.write(change.name, None)

    async def opened(self) -> None:
        """Wait until changes are taken: every replica there is has had the time to be heard."""
        await asyncio.sleep(max(self._opens_at - self._clock(), 0))

    async def write(self, name: str, call: Call | None, *, closed: bool = False) -> int:
        """Add a change; its number."""
        async with self._news:
            self._number += 1
            change = Change(self._number, name, call, closed)
            self._newest[change.key] = change
            self._news.notify_all()
            return self._number

    async def done(self, number: int) -> None:
        """Wait until every replica heard of lately has done `number`."""
        async with self._news:
            while not self._is_done(number):
                await self._wait(lambda: self._is_done(number), POLL_S)

    def _is_done(self, number: int) -> bool:
        now = self._clock()
        self._heard = {name: heard for name, heard in self._heard.items() if now - heard[1] <= SILENCE_S}
        return all(have >= number for have, _ in self._heard.values())

    async def _wait(self, met: Callable[[], bool], limit_s: float) -> None:
        """Wait until `met`, or for so long. The condition's lock is held before and after."""
        try:
            async with asyncio.timeout(limit_s):
                await self._news.wait_for(met)
        except TimeoutError:
            return
