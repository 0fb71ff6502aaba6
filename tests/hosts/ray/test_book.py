"""Adapters alike in all replicas: the book, and those that follow it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polylens.errors import PolylensError
from polylens.hosts.ray import book as book_module
from polylens.hosts.ray.book import SILENCE_S, Book
from polylens.hosts.ray.follower import Follower
from polylens.hosts.ray.wire import Call


def load(name: str, content: str) -> Call:
    return Call("POST", "/v1/load_lora_adapter", body=json.dumps({"lora_name": name, "content": content}).encode())


def unload(name: str) -> Call:
    return Call("POST", "/v1/unload_lora_adapter", body=json.dumps({"lora_name": name}).encode())


class Replica:
    """A replica whose adapters are a dict, and its follower."""

    def __init__(self, book: Book, name: str, refuses: str = "") -> None:
        self.adapters: dict[str, str] = {}
        self.refuses = refuses
        routes = [
            Route("/v1/load_lora_adapter", self._load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]),
        ]
        self.follower = Follower(book, name, Starlette(routes=routes))
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> Replica:
        await self.follower.catch_up()
        self.task = asyncio.create_task(self.follower.run())
        return self

    async def stop(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _load(self, request: Request) -> Response:
        body = await request.json()
        await asyncio.sleep(0.01)
        if body["content"] == self.refuses:
            return JSONResponse({"error": "no"}, 400)
        self.adapters[body["lora_name"]] = body["content"]
        return JSONResponse({})

    async def _unload(self, request: Request) -> Response:
        body = await request.json()
        return JSONResponse({}, 200 if self.adapters.pop(body["lora_name"], None) else 404)


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_module, "POLL_S", 0.05)


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main, 20))


async def do(book: Book, name: str, call: Call | None, **more: Any) -> None:
    await book.done(await book.write(name, call, **more))


def test_a_change_is_done_when_every_replica_has_done_it():
    async def main() -> None:
        book = Book()
        replicas = [await Replica(book, name).start() for name in "abc"]
        await do(book, "gauges", load("gauges", "1"))
        assert [one.adapters for one in replicas] == [{"gauges": "1"}] * 3
        await do(book, "gauges", load("gauges", "2"))
        assert [one.adapters for one in replicas] == [{"gauges": "2"}] * 3
        await do(book, "gauges", unload("gauges"))
        await do(book, "gauges", unload("gauges"))  # what is gone already is no failure
        assert [one.adapters for one in replicas] == [{}] * 3
        assert not any(one.follower.failure for one in replicas)
        for one in replicas:
            await one.stop()

    run(main())


def test_a_replica_that_starts_later_has_all_of_it_before_it_takes_requests():
    async def main() -> None:
        book = Book()
        for content in "12":
            await do(book, "gauges", load("gauges", content))
        await do(book, "xray", load("xray", "3"))
        await do(book, "xray", unload("xray"))
        late = Replica(book, "late")
        await late.follower.catch_up()
        assert late.adapters == {"gauges": "2"}

    run(main())


def test_requests_wait_at_a_closed_gate_and_only_for_that_name():
    async def main() -> None:
        book = Book()
        replica = await Replica(book, "a").start()
        await do(book, "gauges", None, closed=True)
        await asyncio.wait_for(replica.follower.pass_gate("xray"), 1)
        waiting = asyncio.create_task(replica.follower.pass_gate("gauges"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await do(book, "gauges", None)
        await asyncio.wait_for(waiting, 1)
        await replica.stop()

    run(main())


def test_a_replica_that_is_gone_is_not_waited_for():
    async def main() -> None:
        now = [0.0]
        book = Book(clock=lambda: now[0])
        await (await Replica(book, "dead").start()).stop()
        number = await book.write("gauges", load("gauges", "1"))
        waiting = asyncio.create_task(book.done(number))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        now[0] = SILENCE_S + 1
        await asyncio.wait_for(waiting, 2)

    run(main())


def test_a_replica_that_cannot_do_what_another_could_says_so():
    async def main() -> None:
        book = Book()
        replica = await Replica(book, "a", refuses="bad").start()
        await book.write("gauges", load("gauges", "bad"))
        assert replica.task is not None
        await replica.task
        assert isinstance(replica.follower.failure, PolylensError)
        assert "no" in str(replica.follower.failure)

    run(main())


def test_a_book_that_is_started_anew_learns_from_the_replicas_and_opens_their_gates():
    async def main() -> None:
        old, new = Book(), Book()
        replicas = [await Replica(old, name).start() for name in "ab"]
        await do(old, "gauges", load("gauges", "1"))
        await do(old, "gauges", None, closed=True)
        for one in replicas:
            one.follower._book = new  # what Ray's handle does when the deployment is there again
        waiting = asyncio.create_task(replicas[0].follower.pass_gate("gauges"))
        await asyncio.wait_for(waiting, 2)
        await new.opened()
        await do(new, "gauges", load("gauges", "2"))
        assert [one.adapters for one in replicas] == [{"gauges": "2"}] * 2
        late = Replica(new, "late")
        await late.follower.catch_up()
        assert late.adapters == {"gauges": "2"}
        for one in replicas:
            await one.stop()

    run(main())


def test_what_is_kept_does_not_grow_with_the_number_of_changes():
    async def main() -> None:
        book = Book()
        for turn in range(50):
            await book.write("gauges", load("gauges", str(turn)))
            await book.write("gauges", None, closed=turn % 2 == 0)
        assert [change.number for change in book.since(0)] == [99, 100]
        assert book.since(99)[0].number == 100

    run(main())
