"""A server in a thread of the test's process: quick to start, and the test can look into its engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import uvicorn

from polylens.engine.engine import Engine, StepOutput
from polylens.engine.thread import EngineThread
from polylens.server.app import build_app
from polylens.server.options import ServerOptions
from polylens.server.run import listen, uvicorn_config
from polylens.server.service import Service

START_TIMEOUT_S = 60

GIVE_UP_S = 60.0
"""When a test that waits for something fails: long enough for the slowest machine, as nothing is decided by it."""

HELD_TURN_S = 0.002
"""How long a step that does nothing takes."""


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
        assert self.thread.wait_idle(GIVE_UP_S)
        self.thread.call(self.engine.check_integrity).result()
        stats = self.thread.stats
        assert (stats.running, stats.waiting, stats.kv_pages_used) == ({}, {}, 0)

    @contextmanager
    def held(self) -> Iterator[Callable[[], None]]:
        """Within the block no request goes on, while deadlines and aborts still count; gives what lets them go on."""
        step, released = self.engine.step, threading.Event()

        def step_or_wait() -> list[StepOutput]:
            return step() if released.wait(HELD_TURN_S) else []

        self.engine.step = step_or_wait  # type: ignore[method-assign]
        try:
            yield released.set
        finally:
            released.set()
            del self.engine.step

    def let_deadlines_pass(self) -> None:
        """The deadlines of all requests in flight are over now."""

        def pass_() -> None:
            for handle in self.thread._requests.all():
                handle.deadline = 0.0

        self.thread.call(pass_).result()


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds that gives no event."""
    deadline = time.monotonic() + GIVE_UP_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


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
