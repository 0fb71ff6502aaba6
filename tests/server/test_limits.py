"""Bodies, queue, deadlines, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from polylens.server.options import ServerOptions
from tests.server.conftest import Serve
from tests.server.local import Local
from tests.server.media import PICTURE, QUESTION, ask, png_url

LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}
CHAT = "/v1/chat/completions"


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": ask(QUESTION), **LONG, **more}


def lines(response: httpx.Response) -> list[Any]:
    events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


# ---- bodies


def test_a_large_body_is_refused_before_it_is_sent(serve: Serve):
    server = serve(ServerOptions(("tiny",), max_body_bytes=1000))
    assert server.http.post(CHAT, content=b" " * 1001).status_code == 413
    assert server.http.post(CHAT, content=iter([b" " * 600] * 2)).status_code == 413  # chunked: no length announced
    assert server.http.post(CHAT, content=b" " * 1000).status_code == 400
    assert server.service._bodies.num_bytes == 0


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"[]", b"{", b"\xff\xfe", b'{"model": 1e999}', b"[" * 100_000, b'"' + b"x" * 70_000, b"NaN"],
)
def test_what_is_no_json_object_is_400(serve: Serve, content: bytes):
    answer = serve(ServerOptions(("tiny",))).http.post(CHAT, content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_too_many_media_are_refused(serve: Serve):
    server = serve(ServerOptions(("tiny",)))
    answer = server.http.post(CHAT, json=body(messages=ask("hi", *["data:,"] * 33)))
    assert answer.status_code == 400
    assert "at most 32" in answer.json()["error"]["message"]


# ---- deadlines and the queue


def test_a_deadline_ends_a_request(serve: Serve):
    server = serve(ServerOptions(("tiny",)))
    answer = server.http.post(CHAT, json=body(deadline_s=0.05))
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    server.settle()


def test_the_servers_deadline_holds_for_streams(serve: Serve):
    server = serve(ServerOptions(("tiny",), deadline_s=0.2))
    server.http.post(CHAT, json=body(max_tokens=1))
    with server.http.stream("POST", CHAT, json=body(deadline_s=50, stream=True)) as response:
        if response.status_code == 200:  # it had begun
            assert lines(response)[-1]["error"]["code"] == "deadline_exceeded"
        else:
            assert response.status_code == 504
    server.settle()


def test_past_the_queue_is_429_with_retry_after(serve: Serve):
    """The engine of these tests runs one request, and two may wait."""
    server = serve(ServerOptions(("tiny",)))
    with server.http.stream("POST", CHAT, json=body(stream=True, n=3)) as response:
        assert response.status_code == 200
        refused = server.http.post(CHAT, json=body())
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
    server.settle()
    assert server.http.post(CHAT, json=body(max_tokens=1)).status_code == 200
    server.settle()


def test_n_beyond_the_queue_takes_none(serve: Serve):
    server = serve(ServerOptions(("tiny",)))
    assert server.http.post(CHAT, json=body(n=4)).status_code == 429
    server.settle()


# ---- clients that go away


def steps(server: Local) -> int:
    return asyncio.run(server.thread.run(lambda engine: engine.num_steps))


@pytest.mark.parametrize("adapter", ["tiny", "eyes"])
@pytest.mark.parametrize("num_choices", [1, 2])
def test_a_client_that_leaves_a_stream_frees_its_pages(serve: Serve, adapter: str, num_choices: int):
    server = serve(ServerOptions(("tiny",)))
    asked = body(stream=True, model=adapter, n=num_choices, messages=ask(QUESTION, png_url(PICTURE)))
    with server.http.stream("POST", CHAT, json=asked) as response:
        next(response.iter_lines())
    server.settle()


def test_a_client_that_leaves_while_it_waits_is_forgotten(serve: Serve):
    server = serve(ServerOptions(("tiny",)))
    with server.http.stream("POST", CHAT, json=body(stream=True)) as response:
        next(response.iter_lines())
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + CHAT, json=body(), timeout=0.3)
        deadline = time.monotonic() + 20
        while server.thread.num_in_flight > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.thread.num_in_flight <= 1
    server.settle()


def test_half_a_body_holds_nothing(serve: Serve):
    server = serve(ServerOptions(("tiny",)))
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{{".encode())
        time.sleep(0.1)
    deadline = time.monotonic() + 10
    while server.service._bodies.num_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.service._bodies.num_bytes == 0
    server.settle()
