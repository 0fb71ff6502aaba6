"""A replica: an engine with the server's own application around it, reached without a socket."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from ray import serve

from polylens.errors import UnknownAdapterError
from polylens.hosts.ray.follower import Follower
from polylens.hosts.ray.loopback import stay_on_loopback
from polylens.hosts.ray.losses import ReplicaUnfitError
from polylens.hosts.ray.wire import answer, answer_whole
from polylens.models.loading import load_model
from polylens.server.app import build_app
from polylens.server.service import Service
from polylens.server.start import model_defaults, start, stated_defaults

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ray.serve.handle import DeploymentHandle

    from polylens.engine.thread import EngineThread
    from polylens.hosts.ray.settings import Settings
    from polylens.hosts.ray.wire import Call, Head
    from polylens.server.options import ServerOptions


class RemoteBook:
    """The book of adapters, behind a handle of Ray's."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def follow(self, replica: str, edition: str, number: int, *, serving: bool) -> Any:
        return await self._handle.follow.remote(replica, edition, number, serving=serving)

    async def restore(self, number: int, known: Any) -> Any:
        return await self._handle.restore.remote(number, known)


class EngineReplica:
    """What Ray makes several of."""

    async def __init__(self, settings: Settings, book: DeploymentHandle) -> None:  # type: ignore[misc]  # Ray awaits it
        stay_on_loopback()
        self._thread, options = await asyncio.to_thread(start_engine, settings)
        self._app = build_app(Service(self._thread, options))
        self._name = serve.get_replica_context().replica_id.unique_id
        self._holding = serve.multiplexed(_hold, max_num_models_per_replica=settings.adapters_per_replica)
        self._follower = Follower(RemoteBook(book), self._name, self._app)
        await self._follower.catch_up()
        self._following = asyncio.ensure_future(self._follower.run())

    async def answer(self, call: Call) -> AsyncGenerator[Head | bytes]:
        """The application's answer. Raises ReplicaUnfitError if another replica had better be asked."""
        self._check_fit()
        adapter = call.affinity.adapter
        await self._follower.pass_gate(adapter)
        if self._knows(adapter):
            await self._holding(adapter)
        async with aclosing(answer(self._app, call)) as pieces:
            async for piece in pieces:
                yield piece

    def _knows(self, adapter: str) -> bool:
        try:
            self._thread.registry.path(adapter)
        except UnknownAdapterError:
            return False
        return True

    async def whole(self, call: Call) -> tuple[str, Head]:
        """This replica's name, and its answer to a call that is answered whole."""
        return self._name, await answer_whole(self._app, call)

    async def check_health(self) -> None:
        """Called by Ray; an error has this replica replaced."""
        self._check_fit()

    def _check_fit(self) -> None:
        problem = self._thread.failure or self._follower.failure
        if problem is not None:
            raise ReplicaUnfitError(str(problem))

    async def __del__(self) -> None:
        """Called by Ray when the requests have ended, or had their time."""
        if hasattr(self, "_following"):
            self._following.cancel()
        if hasattr(self, "_thread"):
            await asyncio.to_thread(self._thread.stop)


async def _hold(adapter: str) -> str:
    """What Ray calls loading. The engine reads the adapter when its request comes, and keeps it by its own budget."""
    return adapter


def start_engine(settings: Settings) -> tuple[EngineThread, ServerOptions]:
    """The engine with its adapters, and the options of the application around it. Blocks. Raises PolylensError."""
    stated = stated_defaults(settings.generation_config)
    loaded = load_model(settings.model, settings.engine, settings.chat_template)
    defaults = stated if stated is not None else model_defaults(loaded)
    # Ray gives a replica no more requests than it takes, so its own queue never refuses one.
    thread = start(
        loaded, settings.engine, settings.adapters, max_queue=settings.requests_per_replica, lazy=settings.lazy
    )
    sampling = {**defaults, **settings.server.sampling}
    # Keys, and pages of other origins, are the ingress's business.
    options = dataclasses.replace(settings.server, sampling=sampling, api_keys=(), admin_keys=(), cors_origins=())
    return thread, options
