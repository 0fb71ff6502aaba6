"""Serve an application until a signal says stop, and then end in good order."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from typing import TYPE_CHECKING

import uvicorn

from polylens.errors import PolylensError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from types import FrameType

    from starlette.applications import Starlette

    from polylens.engine.thread import EngineThread

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""How long an idle connection stays open: longer than the proxies in front keep theirs, so that they close first."""

FLUSH_S = 5
"""Time to send what is answered already, once nothing runs any more: a client may not read it."""

BACKLOG = 2048
MAX_HEADER_BYTES = 64 * 1024


def listen(host: str, port: int) -> socket.socket:
    """The listening socket; made before the model is loaded, so that a port in use is said at once."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:  # in use, not ours; no port number; no host name
        raise PolylensError(f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}") from error


def uvicorn_config(app: Starlette, log_level: str = "info") -> uvicorn.Config:
    """How connections are handled."""
    return uvicorn.Config(
        app,
        log_level=log_level,
        access_log=False,  # paths say little, and the requests have their own line
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=FLUSH_S,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        server_header=False,
        lifespan="off",
        ws="none",
        http="h11",
        log_config=None,
    )


class Server(uvicorn.Server):
    """uvicorn's server with a stop in good order: the first signal refuses new requests (503) and lets the others
    finish; when they have, or the limit is over, or a second signal comes, the process ends."""

    def __init__(self, config: uvicorn.Config, thread: EngineThread, drain_s: float) -> None:
        super().__init__(config)
        self._thread = thread
        self._drain_s = drain_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: Future[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn for SIGINT and SIGTERM, in a signal handler."""
        if self._loop is None or self._stopping is not None:
            self.should_exit = self.force_exit = True
            self._thread.hurry()  # the loop ends only when what it waits for does
            return
        log.info("got %s: finishing running requests", signal.Signals(sig).name)
        self._stopping = asyncio.run_coroutine_threadsafe(self._stop(), self._loop)

    async def _stop(self) -> None:
        await self._thread.drain(self._drain_s)
        self.should_exit = True

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; ends when the server has stopped."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)


def serve(
    build: Callable[[], Starlette],
    thread: EngineThread,
    listener: socket.socket,
    *,
    drain_s: float,
    log_level: str,
    on_ready: Callable[[], None],
) -> None:
    """Serve until a signal. `build` makes the application, on the loop it will run on; `on_ready` is called then."""

    async def main() -> None:
        config = uvicorn_config(build(), log_level)
        server = Server(config, thread, drain_s)
        on_ready()
        await server.serve([listener])

    try:
        asyncio.run(main())
    finally:
        thread.stop()
