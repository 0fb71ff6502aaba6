"""Calls of an application without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from polylens.hosts.ray.affinity import Affinity
from polylens.hosts.ray.wire import Call, EndedEarlyError, Head, answer, answer_whole, call_of, says_something
from polylens.server.events import event

ROLE = event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
TEXT = event({"choices": [{"delta": {"content": "x"}, "finish_reason": None}]})
END = b"data: [DONE]\n\n"


def app_of(*pieces: bytes, gate: asyncio.Event | None = None, ended: list[str] | None = None) -> Starlette:
    async def source() -> AsyncIterator[bytes]:
        try:
            for piece in pieces:
                yield piece
                await asyncio.sleep(0)
            if gate is not None:
                await gate.wait()
        finally:
            if ended is not None:
                ended.append("ended")

    async def stream(_request: Request) -> Response:
        return StreamingResponse(source(), media_type="text/event-stream")

    async def echo(request: Request) -> Response:
        return JSONResponse({"body": (await request.body()).decode(), "query": request.url.query}, 201)

    async def broken(_request: Request) -> Response:
        raise ValueError("broken")

    return Starlette(
        routes=[Route("/stream", stream), Route("/echo", echo, methods=["POST"]), Route("/broken", broken)]
    )


async def collect(app: Starlette, path: str) -> list[Head | bytes]:
    return [piece async for piece in answer(app, Call("GET", path))]


def test_a_plain_answer_is_one_piece():
    call = Call("POST", "/echo", b"a=1", ((b"content-type", b"text/plain"),), b"hello")
    head = asyncio.run(answer_whole(app_of(), call))
    assert (head.status, head.whole, head.streams) == (201, True, False)
    assert head.body == b'{"body":"hello","query":"a=1"}'


def test_a_stream_begins_with_its_first_text():
    pieces = asyncio.run(collect(app_of(ROLE, ROLE, TEXT, TEXT, END), "/stream"))
    head = pieces[0]
    assert isinstance(head, Head)
    assert head.streams
    assert not head.whole
    assert head.body == ROLE + ROLE + TEXT
    assert b"".join(piece for piece in pieces[1:] if isinstance(piece, bytes)) == TEXT + END


def test_a_stream_that_never_says_anything_is_whole_at_its_end():
    (head,) = asyncio.run(collect(app_of(ROLE), "/stream"))
    assert isinstance(head, Head)
    assert head.whole
    assert head.body == ROLE


def test_closing_it_ends_the_application():
    async def main() -> list[str]:
        ended: list[str] = []
        pieces = answer(app_of(TEXT, gate=asyncio.Event(), ended=ended), Call("GET", "/stream"))
        await anext(pieces)
        assert ended == []
        await pieces.aclose()
        return ended

    assert asyncio.run(main()) == ["ended"]


def test_waiting_for_the_client_to_go_can_be_given_up_and_taken_up_again():
    async def app(_scope, receive, send):
        await receive()
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(receive(), 0.01)
        await Response("still there")(_scope, receive, send)

    head = asyncio.run(answer_whole(app, Call("GET", "/")))  # type: ignore[arg-type]
    assert head.body == b"still there"


def test_an_error_that_was_answered_is_an_answer():
    head = asyncio.run(answer_whole(app_of(), Call("GET", "/broken")))
    assert head.status == 500


def test_an_application_that_breaks_off_is_an_error():
    async def broken(_scope, _receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": TEXT, "more_body": True})
        await asyncio.sleep(0)
        raise OSError("gone")

    async def silent(_scope, _receive, _send):
        pass

    with pytest.raises(OSError, match="gone"):
        asyncio.run(collect(broken, "/"))  # type: ignore[arg-type]
    with pytest.raises(EndedEarlyError):
        asyncio.run(collect(silent, "/"))  # type: ignore[arg-type]


def test_keys_and_cookies_do_not_reach_replicas():
    headers = [(b"content-type", b"a/b"), (b"authorization", b"Bearer x"), (b"cookie", b"y")]
    request = Request({"type": "http", "method": "POST", "path": "/p", "query_string": b"q", "headers": headers})
    affinity = Affinity("gauges", "a picture")
    assert call_of(request, b"body", affinity) == Call(
        "POST", "/p", b"q", ((b"content-type", b"a/b"),), b"body", affinity
    )


@pytest.mark.parametrize(
    ("events", "something"),
    [
        (ROLE, False),
        (ROLE + TEXT, True),
        (event({"choices": [{"delta": {}, "finish_reason": "stop"}]}), True),
        (event({"choices": [{"text": "", "finish_reason": None}]}), False),
        (event({"choices": [{"text": "x", "finish_reason": None}]}), True),
        (event({"error": {"message": "no"}}), True),
        (event({"choices": [], "usage": {}}), True),
        (END, True),
    ],
)
def test_what_counts_as_said(events: bytes, something: bool):
    assert says_something(events) is something
