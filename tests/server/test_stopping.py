"""SIGTERM: running requests finish, new ones are refused, the process ends with 0."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from polylens import LLM
from polylens.engine.thread import EngineThread
from polylens.server.app import build_app
from polylens.server.options import ServerOptions
from polylens.server.run import Server, listen, uvicorn_config
from polylens.server.service import Service
from tests.server.conftest import Shop
from tests.server.local import GIVE_UP_S, Local, until
from tests.server.media import QUESTION, ask
from tests.server.process import serving

LONG = {"model": "tiny", "messages": ask(QUESTION), "max_tokens": 40, "ignore_eos": True, "temperature": 0}
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Stoppable:
    """A server in a thread that stops as one in a process does, on what its signal handler is told."""

    local: Local
    server: Server
    runner: threading.Thread

    def signal(self) -> None:
        self.server.handle_exit(signal.SIGTERM, None)
        until(lambda: not self.local.thread.ready)

    def ends(self) -> bool:
        self.runner.join(GIVE_UP_S)
        return not self.runner.is_alive()


@pytest.fixture
def drain_s() -> float:
    return GIVE_UP_S


@pytest.fixture
def stoppable(shop: Shop, drain_s: float) -> Iterator[Stoppable]:
    engine = LLM(shop.model).engine
    thread = EngineThread(engine, adapters=False).start()
    service = Service(thread, ServerOptions(("tiny",), drain_s=drain_s))
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = Server(uvicorn_config(build_app(service)), thread, drain_s)
    runner = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    runner.start()
    with httpx.Client(base_url=url, timeout=GIVE_UP_S) as http:
        http.get("/ready").raise_for_status()
        yield Stoppable(Local(url, service, engine, thread, http), server, runner)
    server.should_exit = True
    runner.join(GIVE_UP_S)
    thread.stop()
    listener.close()


def test_a_stop_lets_running_requests_end_and_refuses_new_ones(stoppable: Stoppable):
    local = stoppable.local
    with local.held() as go_on, local.http.stream("POST", CHAT, json={**LONG, "stream": True}) as running:
        arrived = running.iter_lines()
        next(arrived)
        stoppable.signal()
        refused = local.http.post(CHAT, json=LONG)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert "retry-after" in refused.headers
        assert local.http.get("/ready").status_code == 503
        assert local.http.get("/health").status_code == 200
        go_on()
        assert [line for line in arrived if line][-1] == "data: [DONE]"
    assert stoppable.ends()


@pytest.mark.parametrize("drain_s", [0.0])
def test_the_limit_ends_what_is_left(stoppable: Stoppable):
    local = stoppable.local
    with local.held(), local.http.stream("POST", CHAT, json={**LONG, "stream": True}) as running:
        arrived = running.iter_lines()
        next(arrived)
        stoppable.signal()
        left = [line for line in arrived if line]
        assert "shutting_down" in left[-2]
        assert left[-1] == "data: [DONE]"
    assert stoppable.ends()


def test_a_second_signal_ends_at_once(stoppable: Stoppable):
    local = stoppable.local
    with local.held(), local.http.stream("POST", CHAT, json={**LONG, "stream": True}) as running:
        arrived = running.iter_lines()
        next(arrived)
        stoppable.signal()
        assert stoppable.runner.is_alive()
        stoppable.server.handle_exit(signal.SIGTERM, None)
        assert stoppable.ends()


@pytest.mark.full  # in CI the server of `test_serve_command` is ended so
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_ends_with_0(shop: Shop, number: signal.Signals):
    """The signals reach the handler; what it does is tested above."""
    with serving(shop.model, "--served-model-name", "tiny") as server:
        httpx.post(server.url + CHAT, json=LONG, timeout=GIVE_UP_S).raise_for_status()
        server.process.send_signal(number)
        assert server.process.wait(GIVE_UP_S) == 0
        assert "finishing running requests" in server.log
