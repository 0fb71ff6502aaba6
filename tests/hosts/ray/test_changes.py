"""Loads and unloads that all replicas do, or none, whatever is lost meanwhile."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from polylens.hosts.ray import book as book_module
from polylens.hosts.ray.book import Book
from polylens.hosts.ray.changes import Changes, name_of
from polylens.hosts.ray.wire import Call, Head, answer_whole
from polylens.server.schema import MAX_NAME_CHARS
from tests.hosts.ray.dict_replica import Replica, load, unload, until


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_module, "POLL_S", 0.05)


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main, 20))


class Group:
    """Two replicas and the changes they follow; the first one tries."""

    async def start(self, refuses: str = "") -> Group:
        self.tries = 0
        self.go = asyncio.Event()
        self.go.set()
        self.changes = Changes(Book(), self._attempt)
        self.replicas = [Replica(self.changes, name, refuses) for name in "ab"]
        await asyncio.gather(*(one.start() for one in self.replicas))
        return self

    async def _attempt(self, call: Call) -> Head:
        self.tries += 1
        await self.go.wait()
        return await answer_whole(self.replicas[0].app, call)

    @property
    def adapters(self) -> list[dict[str, str]]:
        return [one.adapters for one in self.replicas]

    async def stop(self) -> None:
        for one in self.replicas:
            await one.stop()


def test_what_one_replica_refuses_none_does():
    async def main() -> None:
        group = await Group().start(refuses="bad")
        assert (await group.changes.change(load("gauges", "1"))).status == 200
        assert (await group.changes.change(load("gauges", "bad"))).status == 400
        assert group.adapters == [{"gauges": "1"}] * 2
        for one in group.replicas:
            await asyncio.wait_for(one.follower.pass_gate("gauges"), 5)
            assert one.follower.failure is None
        await group.stop()

    run(main())


def test_a_change_whose_client_has_gone_is_finished_before_the_next_one_begins():
    async def main() -> None:
        group = await Group().start()
        group.go.clear()
        first = asyncio.create_task(group.changes.change(load("gauges", "1")))
        await until(lambda: group.tries == 1)
        first.cancel()
        second = asyncio.create_task(group.changes.change(load("gauges", "2")))
        await asyncio.sleep(0.1)
        assert group.tries == 1
        group.go.set()
        assert (await second).status == 200
        assert group.adapters == [{"gauges": "2"}] * 2
        await group.stop()

    run(main())


def test_an_attempt_that_breaks_off_leaves_the_gate_open():
    async def main() -> None:
        group = await Group().start()
        whole, group.replicas[0].app = group.replicas[0].app, None  # type: ignore[assignment]
        with pytest.raises(TypeError):
            await group.changes.change(load("gauges", "1"))
        group.replicas[0].app = whole
        for one in group.replicas:
            await asyncio.wait_for(one.follower.pass_gate("gauges"), 5)
        assert group.adapters == [{}] * 2
        await group.stop()

    run(main())


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize(
    ("call", "after"), [(load("gauges", "2"), {"gauges": "2"}), (unload("gauges"), {})], ids=["load", "unload"]
)
def test_a_change_in_which_the_book_is_lost_is_done_again_by_the_next(
    call: Call, after: dict[str, str], first: int, late: bool
):
    """first: the replica that finds the new book first. late: the other one does so when changes are taken again."""

    async def main() -> None:
        old = Book()
        replicas = await asyncio.gather(*(Replica(old, name).start() for name in "ab"))
        await old.done(await old.write("gauges", "content", load("gauges", "1")))
        await old.done(await old.write("gauges", "close", call))
        await replicas[1].stop()
        await old.write("gauges", "content", call)  # which only one gets to know
        await until(lambda: replicas[0].adapters == after)
        await replicas[0].stop()
        assert replicas[1].adapters == {"gauges": "1"}
        changes = Changes(Book(), lambda call: answer_whole(replicas[first].app, call))
        replicas[first].go_on(changes)
        if late:
            await asyncio.wait_for(replicas[first].follower.pass_gate("gauges"), 5)
        replicas[1 - first].go_on(changes)
        await until(lambda: [one.adapters for one in replicas] == [after] * 2)
        for one in replicas:
            await asyncio.wait_for(one.follower.pass_gate("gauges"), 5)
            assert one.follower.failure is None
            await one.stop()

    run(main())


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[" * 100_000, b'{"lora_name": 3}', b'{"lora_name": null}'])
def test_a_body_without_a_name_is_about_none(body: bytes):
    assert name_of(Call("POST", "/v1/load_lora_adapter", body=body)) == ""


def test_a_name_that_no_replica_takes_is_kept_nowhere():
    body = json.dumps({"lora_name": "x" * (MAX_NAME_CHARS + 1)}).encode()
    assert name_of(Call("POST", "/v1/load_lora_adapter", body=body)) == ""
