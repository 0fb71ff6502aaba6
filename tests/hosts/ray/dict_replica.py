"""Replicas whose adapters are a dict, for tests of how they are kept alike."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polylens.hosts.ray.follower import BookClient, Follower
from polylens.hosts.ray.wire import Call


def load(name: str, content: str) -> Call:
    return Call("POST", "/v1/load_lora_adapter", body=json.dumps({"lora_name": name, "content": content}).encode())


def unload(name: str) -> Call:
    return Call("POST", "/v1/unload_lora_adapter", body=json.dumps({"lora_name": name}).encode())


class Replica:
    """A replica whose adapters are a dict, and its follower."""

    def __init__(self, book: BookClient, name: str, refuses: str = "") -> None:
        self.adapters: dict[str, str] = {}
        self.refuses = refuses
        routes = [
            Route("/v1/load_lora_adapter", self._load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)
        self.follower = Follower(book, name, self.app)
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> Replica:
        await self.follower.catch_up()
        return self.go_on()

    def go_on(self, book: BookClient | None = None) -> Replica:
        """Follow, or follow another book: what Ray's handle does when its deployment is there again."""
        self.follower._book = book or self.follower._book
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


async def until(met: Callable[[], bool]) -> None:
    while not met():
        await asyncio.sleep(0.005)
