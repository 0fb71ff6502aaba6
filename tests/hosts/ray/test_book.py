"""Adapters alike in all replicas: the book, and those that follow it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from polylens.errors import PolylensError
from polylens.hosts.ray import book as book_module
from polylens.hosts.ray.book import SILENCE_S, Book, Kind
from polylens.hosts.ray.wire import Call
from tests.hosts.ray.dict_replica import Replica, load, unload, until


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_module, "POLL_S", 0.05)


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main, 20))


async def do(book: Book, name: str, kind: Kind, call: Call | None = None) -> None:
    await book.done(await book.write(name, kind, call))


def test_a_change_is_done_when_every_replica_has_done_it():
    async def main() -> None:
        book = Book()
        replicas = [await Replica(book, name).start() for name in "abc"]
        await do(book, "gauges", "content", load("gauges", "1"))
        assert [one.adapters for one in replicas] == [{"gauges": "1"}] * 3
        await do(book, "gauges", "content", load("gauges", "2"))
        assert [one.adapters for one in replicas] == [{"gauges": "2"}] * 3
        await do(book, "gauges", "content", unload("gauges"))
        await do(book, "gauges", "content", unload("gauges"))  # what is gone already is no failure
        assert [one.adapters for one in replicas] == [{}] * 3
        assert not any(one.follower.failure for one in replicas)
        for one in replicas:
            await one.stop()

    run(main())


def test_a_replica_that_starts_later_has_all_of_it_before_it_takes_requests():
    async def main() -> None:
        book = Book()
        for content in "12":
            await do(book, "gauges", "content", load("gauges", content))
        await do(book, "xray", "content", load("xray", "3"))
        await do(book, "xray", "content", unload("xray"))
        late = Replica(book, "late")
        await late.follower.catch_up()
        assert late.adapters == {"gauges": "2"}

    run(main())


def test_requests_wait_at_a_closed_gate_and_only_for_that_name():
    async def main() -> None:
        book = Book()
        replica = await Replica(book, "a").start()
        await do(book, "gauges", "close")
        await asyncio.wait_for(replica.follower.pass_gate("xray"), 1)
        waiting = asyncio.create_task(replica.follower.pass_gate("gauges"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await do(book, "gauges", "open")
        await asyncio.wait_for(waiting, 1)
        await replica.stop()

    run(main())


def test_a_replica_that_is_gone_is_not_waited_for():
    async def main() -> None:
        now = [0.0]
        book = Book(clock=lambda: now[0])
        await (await Replica(book, "dead").start()).stop()
        number = await book.write("gauges", "content", load("gauges", "1"))
        waiting = asyncio.create_task(book.done(number))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        now[0] = SILENCE_S + 1
        await asyncio.wait_for(waiting, 2)

    run(main())


def test_replicas_that_fail_to_start_hold_nobody_up():
    async def main() -> None:
        book = Book()
        running = await Replica(book, "running").start()
        await do(book, "gauges", "content", load("gauges", "gone"))  # what is loaded, and has left the disk since
        await do(book, "xray", "content", load("xray", "1"))
        with pytest.raises(PolylensError, match="no"):
            await Replica(book, "fails", refuses="gone").follower.catch_up()
        await asyncio.wait_for(do(book, "gauges", "content", unload("gauges")), 2)
        assert running.adapters == {"xray": "1"}
        await running.stop()

    run(main())


def test_a_replica_is_waited_for_from_when_it_may_take_requests():
    async def main() -> None:
        book = Book()
        await do(book, "gauges", "content", load("gauges", "1"))
        late = Replica(book, "late")
        await late.follower.catch_up()
        waiting = asyncio.create_task(do(book, "gauges", "content", load("gauges", "2")))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        late.go_on()
        await asyncio.wait_for(waiting, 2)
        assert late.adapters == {"gauges": "2"}
        await late.stop()

    run(main())


def test_a_replica_that_cannot_do_what_another_could_says_so():
    async def main() -> None:
        book = Book()
        replica = await Replica(book, "a", refuses="bad").start()
        await book.write("gauges", "content", load("gauges", "bad"))
        assert replica.task is not None
        await replica.task
        assert isinstance(replica.follower.failure, PolylensError)
        assert "no" in str(replica.follower.failure)

    run(main())


def test_a_book_that_is_started_anew_learns_from_the_replicas():
    async def main() -> None:
        old, new = Book(), Book()
        replicas = [await Replica(old, name).start() for name in "ab"]
        await do(old, "gauges", "content", load("gauges", "1"))
        for one in replicas:
            await one.stop()
            one.go_on(new)
        replicas.append(await Replica(new, "late").start())  # however early it comes
        assert replicas[2].adapters == {"gauges": "1"}
        await do(new, "gauges", "content", load("gauges", "2"))
        assert [one.adapters for one in replicas] == [{"gauges": "2"}] * 3
        for one in replicas:
            await one.stop()

    run(main())


def test_a_replica_that_was_away_while_the_book_was_started_anew_loses_nothing():
    async def main() -> None:
        old, new = Book(), Book()
        away, other = [await Replica(old, name).start() for name in ("away", "other")]
        for name in ("gauges", "xray", "maps"):
            await do(old, name, "content", load(name, "1"))
        for one in (away, other):
            await one.stop()
        fresh = await Replica(new, "fresh").start()  # the book has opened by then, and nobody has told it anything
        await do(new, "gauges", "content", load("gauges", "2"))
        for one in (away, other):
            one.go_on(new)
        whole = {"gauges": "2", "xray": "1", "maps": "1"}
        await until(lambda: away.adapters == other.adapters == fresh.adapters == whole)
        for one in (away, other, fresh):
            await one.stop()

    run(main())


def test_what_is_kept_does_not_grow_with_the_number_of_changes():
    async def main() -> None:
        book = Book()
        for turn in range(50):
            await book.write("gauges", "content", load("gauges", str(turn)))
            await book.write("gauges", "close" if turn % 2 == 0 else "open")
        assert [change.number for change in book.since(0)] == [99, 100]
        assert book.since(99)[0].number == 100

    run(main())
