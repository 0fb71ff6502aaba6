"""Which adapters all replicas have: changes in one order, and how replicas come to agree on them.

The book numbers the changes. Every replica follows it: asks for what is newer than what it has, does that, and asks
again, which says that it has done it. A change counts as done when every replica that was heard of lately has done
it, so that no request after the answer meets the old content. A replica that starts follows from 0 before it takes
requests. What is kept is the newest change of each name, not the history.

A book that is started anew is another edition and knows nothing; what the last one knew is in the replicas, which give
it back. Until they had time to, it takes no changes, and lets no new replica begin.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from polylens.hosts.ray.wire import Call

POLL_S = 2.0
"""Longest time a replica waits for a change before it asks again, which is also its sign of life."""

SILENCE_S = 10.0
"""A replica not heard of for so long is gone, and not waited for: several polls, and a stalled interpreter."""

Kind = Literal["close", "content", "open"]
Key = tuple[str, Literal["content", "gate"]]


@dataclass(frozen=True)
class Change:
    """What a name means from now on.

    "close": new requests for the name wait, so that none begins with the new content where another still begins with
    the old; `call` is the load or unload that is coming. "content": do that. "open": requests go on.
    """

    number: int
    name: str
    kind: Kind
    call: Call | None = None

    @property
    def key(self) -> Key:
        return self.name, "content" if self.kind == "content" else "gate"


class Book:
    """See the module's text. Belongs to one loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._opens_at = clock() + 2 * POLL_S
        self._edition = uuid.uuid4().hex
        self._newest: dict[Key, Change] = {}
        self._number = 0
        self._taken: int | None = None
        """The last number of the edition before, once changes of this one follow it."""
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

    def interrupted(self) -> list[Change]:
        """The gates that are closed."""
        return [change for change in self.since(0) if change.kind == "close"]

    async def follow(self, replica: str, edition: str, number: int, *, serving: bool) -> list[Change] | None:
        """`replica` has done everything up to `number`: what comes next, after POLL_S at the latest, or nothing.

        None: it followed another edition, or none, and must say what it knows (`restore`). serving: it takes requests.
        One that does not is waited for from when it has done everything, and not before: it may never come so far.
        """
        if edition != self._edition:
            return None
        async with self._news:
            if serving or number == self._number:
                self._heard[replica] = number, self._clock()
                self._news.notify_all()
            if number == self._number:
                await self._wait(lambda: number < self._number, POLL_S)
            return self.since(number)

    async def restore(self, number: int, known: Mapping[Key, Change]) -> tuple[str, int]:
        """Take over what a replica knows that has done everything up to `number` of the edition before.

        Returns this edition, and the number from which the replica is to follow it. A replica that knows nothing has
        to wait for those that do.
        """
        if not known:
            await self.opened()
        for change in sorted(known.values(), key=lambda one: one.number):
            await self._take(change)
        return self._edition, number if self._taken is None else min(number, self._taken)

    async def _take(self, change: Change) -> None:
        mine = self._newest.get(change.key)
        if self._taken is None:
            if mine is None or mine.number < change.number:
                self._newest[change.key] = change
            self._number = max(self._number, change.number)
        elif mine is None or change.kind == "close":
            # Of a replica that was away: the others hear of it as of a new change. A gate that only it has closed is
            # closed for all, and what was to happen then is done again.
            await self.write(change.name, change.kind, change.call)

    async def opened(self) -> None:
        """Wait until changes are taken: every replica there is has had the time to be heard."""
        await asyncio.sleep(max(self._opens_at - self._clock(), 0))

    async def write(self, name: str, kind: Kind, call: Call | None = None) -> int:
        """Add a change; its number."""
        async with self._news:
            if self._taken is None:
                self._taken = self._number
            self._number += 1
            change = Change(self._number, name, kind, call)
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
