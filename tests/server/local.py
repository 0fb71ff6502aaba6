"""A server in a thread of the test's process: quick to start, and the test can look into its engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import uvicorn

from polylens.engine.engine import Engine
from polylens.engine.thread import EngineThread
from polylens.server.app import build_app
from polylens.server.options import ServerOptions
from polylens.server.run import listen, uvicorn_config
from polylens.server.service import Service

START_TIMEOUT_S = 60


@dataclass(frozen=True)
class Local:
    """A running server: its address, and what is behind it."""

    url: str
    service: Service
    engine: Engine
    thread: EngineThread
    http: httpx.Client

    def settle(self) -> None:
        """Wait until nothing runs, and check that nothing was left behind."""
        for _ in range(500):
            if self.thread.num_in_flight == 0:
                break
            threading.Event().wait(0.01)
        assert self.thread.num_in_flight == 0
        self.thread.call(self.engine.check_integrity).result()
        stats = self.thread.stats
        assert (stats.running, stats.waiting, stats.kv_pages_used) == ({}, {}, 0)


@contextmanager
def running(engine: Engine, thread: EngineThread, options: ServerOptions) -> Iterator[Local]:
    """Serve an engine whose thread runs, on a free port of loopback."""
    service = Service(thread, options)
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn_config(build_app(service)))
    loop_thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    loop_thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with httpx.Client(base_url=url, timeout=START_TIMEOUT_S) as http:
            http.get("/health").raise_for_status()
            yield Local(url, service, engine, thread, http)
    finally:
        server.should_exit = True
        loop_thread.join(START_TIMEOUT_S)
        listener.close()
