"""Bodies, queue, deadlines, and clients that go away."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from polylens.server.options import ServerOptions
from tests.server.conftest import Serve
from tests.server.local import Local, until
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
    with server.held():
        answer = server.http.post(CHAT, json=body(deadline_s=0.01))
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    server.settle()


def test_the_servers_deadline_holds(serve: Serve):
    server = serve(ServerOptions(("tiny",), deadline_s=0.01))
    with server.held():
        assert server.http.post(CHAT, json=body(deadline_s=5000)).status_code == 504
    server.settle()


def test_a_deadline_ends_a_stream_that_has_begun(serve: Serve):
    server = serve(ServerOptions(("tiny",)))
    with server.held(), server.http.stream("POST", CHAT, json=body(deadline_s=5000, stream=True)) as response:
        assert response.status_code == 200
        server.let_deadlines_pass()
        assert lines(response)[-1]["error"]["code"] == "deadline_exceeded"
    server.settle()


def test_past_the_queue_is_429_with_retry_after(serve: Serve):
    """The engine of these tests runs one request, and two may wait."""
    server = serve(ServerOptions(("tiny",)))
    with server.held(), server.http.stream("POST", CHAT, json=body(stream=True, n=3)) as response:
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
    several = {"model": "tiny", "prompt": ["a", "b", "c", "d"], **LONG}
    assert server.http.post("/v1/completions", json=several).status_code == 429
    server.settle()


# ---- clients that go away


@pytest.mark.parametrize("adapter", ["tiny", "eyes"])
@pytest.mark.parametrize("num_choices", [1, 2])
def test_a_client_that_leaves_a_stream_frees_its_pages(serve: Serve, adapter: str, num_choices: int):
    """Within one step: none is taken between the first piece and the end."""
    server = serve(ServerOptions(("tiny",)))
    asked = body(stream=True, model=adapter, n=num_choices, messages=ask(QUESTION, png_url(PICTURE)))
    with server.http.stream("POST", CHAT, json=asked) as response:
        arrived = response.iter_lines()
        next(arrived)
        while '"content":"' not in next(arrived).replace('"content":""', ""):
            pass
        with server.held():
            assert server.thread.num_in_flight == num_choices
            response.close()
            server.settle()


def post_and_leave(server: Local, content: bytes, length: int, seen: Callable[[], bool]) -> None:
    """Send a request by hand; go away once the server has seen it."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
        connection.sendall(head.encode() + content)
        until(seen)


def test_a_client_that_leaves_while_it_waits_is_forgotten(serve: Serve):
    server = serve(ServerOptions(("tiny",)))
    content = json.dumps(body()).encode()
    with server.held(), server.http.stream("POST", CHAT, json=body(stream=True)) as response:
        arrived = response.iter_lines()  # which, if nobody held it, would close the stream
        next(arrived)
        post_and_leave(server, content, len(content), lambda: server.thread.num_in_flight == 2)
        until(lambda: server.thread.num_in_flight == 1)
    server.settle()


def test_half_a_body_holds_nothing(serve: Serve):
    server = serve(ServerOptions(("tiny",)))
    post_and_leave(server, b"{", 500, lambda: server.service._bodies.num_bytes == 1)
    until(lambda: server.service._bodies.num_bytes == 0)
    server.settle()
