"""SIGTERM: running requests finish, new ones are refused, the process ends with 0."""

from __future__ import annotations

import signal
import threading

import httpx

from tests.server.conftest import Shop
from tests.server.media import QUESTION, ask
from tests.server.process import serving

LONG = {"model": "tiny", "messages": ask(QUESTION), "max_tokens": 450, "ignore_eos": True, "temperature": 0}
CHAT = "/v1/chat/completions"


def test_sigterm_drains(shop: Shop):
    with serving(shop.model, "--served-model-name", "tiny") as server, httpx.Client(base_url=server.url) as other:
        other.get("/ready").raise_for_status()
        with httpx.stream("POST", server.url + CHAT, json={**LONG, "stream": True}, timeout=60) as running:
            arrived = running.iter_lines()
            next(arrived)
            server.process.send_signal(signal.SIGTERM)
            while other.get("/ready").status_code == 200:
                threading.Event().wait(0.02)
            refused = other.post(CHAT, json=LONG)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert "retry-after" in refused.headers
            assert [line for line in arrived if line][-1] == "data: [DONE]"
        assert server.process.wait(30) == 0


def test_the_limit_ends_what_is_left(shop: Shop):
    with serving(shop.model, "--served-model-name", "tiny", "--drain-timeout", "0") as server:
        with httpx.stream("POST", server.url + CHAT, json={**LONG, "stream": True}, timeout=60) as running:
            arrived = running.iter_lines()
            next(arrived)
            server.process.send_signal(signal.SIGTERM)
            left = [line for line in arrived if line]
            assert "shutting_down" in left[-2]
            assert left[-1] == "data: [DONE]"
        assert server.process.wait(30) == 0
