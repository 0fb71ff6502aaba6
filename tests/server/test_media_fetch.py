"""Fetching addresses that strangers give: what is reached, and what is not."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from polylens.errors import MediaError
from polylens.server import media_fetch
from polylens.server.media_fetch import Fetcher, is_public
from polylens.server.options import MediaPolicy, ServerOptions
from tests.server.conftest import Serve
from tests.server.media import PICTURE, QUESTION, ask, png_bytes

PNG = png_bytes(PICTURE)


class Site(BaseHTTPRequestHandler):
    """Pictures, redirects and mischief; `seen` are the paths asked for, with their headers."""

    seen: list[tuple[str, dict[str, str]]]

    def do_GET(self) -> None:
        self.seen.append((self.path, dict(self.headers)))
        name, _, rest = self.path[1:].partition("?")
        getattr(self, f"get_{name}", self.get_missing)(rest)

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for header, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(header.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def get_picture(self, _rest: str) -> None:
        self.reply(200, PNG)

    def get_to(self, rest: str) -> None:
        self.reply(302, Location=rest)

    def get_big(self, _rest: str) -> None:
        self.reply(200, b"x" * 9000)

    def get_unannounced(self, _rest: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"x" * 9000)

    def get_zipped(self, _rest: str) -> None:
        self.reply(200, b"x", Content_Encoding="gzip")

    def get_slow(self, _rest: str) -> None:
        self.send_response(200)
        self.end_headers()
        for _ in range(30):
            self.wfile.write(b"x")
            time.sleep(0.1)

    def get_cut(self, _rest: str) -> None:
        self.reply(200, PNG, Content_Length=str(len(PNG) + 100))

    def get_missing(self, _rest: str) -> None:
        self.reply(404)

    def log_message(self, *_arguments: object) -> None:
        """Nothing."""


class Web:
    """The site on every loopback address, and a fetcher that takes 127.0.0.1 for a public one."""

    def __init__(self) -> None:
        handler = type("Handler", (Site,), {"seen": []})
        self.server = ThreadingHTTPServer(("0.0.0.0", 0), handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.seen: list[tuple[str, dict[str, str]]] = handler.seen  # type: ignore[attr-defined]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}/{path}"

    def fetcher(self, **policy: object) -> Fetcher:
        options: dict[str, object] = {"remote": True, "max_bytes": 6000, "timeout_s": 5.0, **policy}
        kind = type("LoopbackFetcher", (Fetcher,), {
            "ports": (self.port,),
            "is_allowed": lambda _self, address: address == "127.0.0.1",
        })  # fmt: skip
        return kind(MediaPolicy(**options))  # type: ignore[arg-type,no-any-return]


@pytest.fixture
def web() -> Iterator[Web]:
    web = Web()
    yield web
    web.server.shutdown()
    web.server.server_close()


def fetch(fetcher: Fetcher, url: str) -> bytes:
    return asyncio.run(fetcher.fetch(url))


def refused(fetcher: Fetcher, url: str) -> str:
    with pytest.raises(MediaError) as caught:
        fetch(fetcher, url)
    return str(caught.value)


def test_a_picture_is_fetched(web: Web):
    assert fetch(web.fetcher(), web.url("picture")) == PNG
    path, headers = web.seen[0]
    assert path == "/picture"
    assert headers["Host"] == f"127.0.0.1:{web.port}"
    assert not {"Cookie", "Authorization"} & headers.keys()


def test_redirects_to_allowed_hosts_are_followed(web: Web):
    assert fetch(web.fetcher(), web.url("to?/picture")) == PNG
    assert fetch(web.fetcher(), web.url(f"to?{web.url('to?/picture')}")) == PNG


@pytest.mark.parametrize("host", ["127.0.0.2", "0.0.0.0", "[::1]", "localhost.", "2130706434", "0x7f.0.0.2", "127.2"])
def test_redirects_elsewhere_are_not(web: Web, host: str):
    """Every spelling of another loopback address. `localhost` also has ::1 on most machines, or is 127.0.0.1 itself."""
    if host == "localhost." and socket.gethostbyname("localhost") == "127.0.0.1":
        pytest.skip("localhost is the allowed address here")
    message = refused(web.fetcher(), web.url(f"to?{web.url('picture', host)}"))
    assert "not of a public host" in message or "not known" in message
    assert [path for path, _ in web.seen] == [web.seen[0][0]]


def test_endless_redirects_end(web: Web):
    assert "redirects more than 3 times" in refused(web.fetcher(), web.url("to?" + "/to?" * 6))


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "ftp://127.0.0.1/", "gopher://x", "//[", "http://[::1", "data:,"]
)
def test_redirects_to_other_schemes_are_refused(web: Web, location: str):
    refused(web.fetcher(), web.url(f"to?{location}"))
    assert len(web.seen) == 1


def test_sizes_count(web: Web):
    assert "larger than 6000" in refused(web.fetcher(), web.url("big"))
    assert "larger than 6000" in refused(web.fetcher(), web.url("unannounced"))
    assert "compressed" in refused(web.fetcher(), web.url("zipped"))


def test_time_counts_in_all(web: Web):
    began = time.monotonic()
    assert "longer than 0.4 s" in refused(web.fetcher(timeout_s=0.4), web.url("slow"))
    assert time.monotonic() - began < 2.5


def test_errors_are_told_without_details(web: Web):
    assert "status 404" in refused(web.fetcher(), web.url("nothing"))
    assert "cannot be fetched" in refused(web.fetcher(), web.url("cut"))


def test_only_listed_hosts(web: Web):
    fetcher = web.fetcher(domains=("pictures.example",))
    assert "not of a host that is allowed" in refused(fetcher, web.url("picture"))
    assert "not of a host that is allowed" in refused(fetcher, "http://evilpictures.example/")
    checked = Fetcher(MediaPolicy(remote=True, domains=("pictures.example",)))._checked
    for host in ("pictures.example", "a.pictures.example", "PICTURES.example."):
        assert checked(f"https://{host}/x").host.decode().endswith("pictures.example")


@pytest.mark.parametrize(
    "url",
    [
        "http://user:pw@example.com/", "http://example.com:22/", "http://example.com:99999/", "http://[::1/", "http://",
        "http:///x", "http://a..b/", "http://" + "a" * 300 + ".com/", "http://example.com/" + "x" * 9000,
    ],
)  # fmt: skip
def test_odd_addresses_are_refused(url: str):
    assert refused(Fetcher(MediaPolicy(remote=True)), url)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "localhost", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "[::1]",
        "[::]", "[fe80::1]", "[fd00::1]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "100.64.0.1", "2130706433",
        "0177.0.0.1", "0x7f000001", "127.1", "[fd00:ec2::254]", "224.0.0.1", "255.255.255.255",
    ],
)  # fmt: skip
def test_inner_addresses_are_not_connected_to(host: str):
    message = refused(Fetcher(MediaPolicy(remote=True, timeout_s=3.0)), f"http://{host}/latest/meta-data/")
    assert "public host" in message or "not known" in message


def test_public_addresses_are_public():
    for address in ("8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"):
        assert is_public(address)


def test_a_name_with_one_inner_address_is_refused(web: Web, monkeypatch: pytest.MonkeyPatch):
    async def both(_host: str, _port: int) -> list[str]:
        return ["127.0.0.1", "127.0.0.2"]

    monkeypatch.setattr(media_fetch, "_addresses_of", both)
    assert "public host" in refused(web.fetcher(), web.url("picture", "both.example"))
    assert web.seen == []


def test_the_name_is_looked_up_once(web: Web, monkeypatch: pytest.MonkeyPatch):
    """The second look-up of a rebinding attack never happens: the checked address is the one connected to."""
    answers = [["127.0.0.1"], ["127.0.0.2"]]

    async def rebinding(_host: str, _port: int) -> list[str]:
        return answers.pop(0)

    monkeypatch.setattr(media_fetch, "_addresses_of", rebinding)
    assert fetch(web.fetcher(), web.url("picture", "rebind.example")) == PNG
    assert answers == [["127.0.0.2"]]


def test_off_by_default(web: Web, serve: Serve):
    asked = {"model": "tiny", "messages": ask(QUESTION, web.url("picture"))}
    answer = serve(ServerOptions(("tiny",))).http.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 400
    assert web.seen == []


def test_on_still_reaches_no_loopback(web: Web, serve: Serve):
    server = serve(ServerOptions(("tiny",), media=MediaPolicy(remote=True)))
    for url in (web.url("picture"), f"http://127.0.0.1/?{web.port}", "http://localhost/"):
        answer = server.http.post("/v1/chat/completions", json={"model": "tiny", "messages": ask(QUESTION, url)})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages[0].content[0]"
    assert web.seen == []


def test_a_fetched_picture_is_answered(web: Web, serve: Serve):
    server = serve(ServerOptions(("tiny",), media=MediaPolicy(remote=True)))
    server.service._media._fetcher = web.fetcher(max_bytes=1 << 20)
    asked = {"model": "eyes", "messages": ask(QUESTION, web.url("picture")), "max_tokens": 2}
    assert server.http.post("/v1/chat/completions", json=asked).status_code == 200
