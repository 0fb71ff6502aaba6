"""Who may do what: API keys, admin keys, and what is open to all."""

from __future__ import annotations

import pytest

from polylens.server.auth import ADMIN_PATHS, Keys
from polylens.server.options import ServerOptions
from tests.server.conftest import Serve
from tests.server.local import Local

CLOSED = ("/v1/models", "/metrics", "/stats", "/page/../v1/models")
OPEN = ("/", "/health", "/ready", "/version", "/page/page.js")


def status(server: Local, path: str, key: str | None, method: str = "GET") -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
    return server.http.request(method, path, headers=headers, json={} if method == "POST" else None).status_code


def test_any_key_of_several_opens_and_others_do_not(serve: Serve):
    server = serve(ServerOptions(("tiny",), api_keys=("one", "two"), admin_keys=("boss",)))
    for path in CLOSED:
        assert status(server, path, None) == 401
        for wrong in ("on", "onee", "ONE", "one two", "ö"):
            assert status(server, path, wrong) == 401
        for right in ("one", "two", "boss"):
            assert status(server, path, right) == 200
    for path in OPEN:
        assert status(server, path, None) == 200


def test_the_scheme_counts(serve: Serve):
    server = serve(ServerOptions(("tiny",), api_keys=("one",)))
    for value, expected in (("Basic one", 401), ("one", 401), ("bearer one", 200), ("Bearer  one", 200)):
        assert server.http.get("/v1/models", headers={"Authorization": value}).status_code == expected
    answer = server.http.get("/v1/models")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("path", sorted(ADMIN_PATHS))
def test_loading_needs_an_admin_key(serve: Serve, path: str):
    server = serve(ServerOptions(("tiny",), api_keys=("one",), admin_keys=("boss",)))
    assert [status(server, path, key, "POST") for key in (None, "wrong", "one")] == [401, 401, 403]
    # Let in, and then told that the endpoint is off.
    assert (
        server.http.post(path, headers={"Authorization": "Bearer boss"}, json={}).json()["error"]["code"] == "disabled"
    )


@pytest.mark.parametrize("path", sorted(ADMIN_PATHS))
def test_api_keys_alone_load_nothing(serve: Serve, path: str):
    server = serve(ServerOptions(("tiny",), api_keys=("one",)))
    assert status(server, path, "one", "POST") == 403


def test_an_admin_key_alone_leaves_the_api_open(serve: Serve):
    server = serve(ServerOptions(("tiny",), admin_keys=("boss",)))
    assert status(server, "/v1/models", None) == 200
    assert status(server, "/v1/load_lora_adapter", None, "POST") == 401


def test_keys_compare_whole():
    keys = Keys(["alpha", "beta"])
    assert "alpha" in keys
    assert "beta" in keys
    assert "alph" not in keys
    assert "" not in keys
    assert not Keys([])


def test_cors_is_off_unless_asked_for(serve: Serve):
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    off = serve(ServerOptions(("tiny",), api_keys=("k",))).http.options("/v1/chat/completions", headers=preflight)
    assert "access-control-allow-origin" not in off.headers
    on = serve(ServerOptions(("tiny",), api_keys=("k",), cors_origins=("https://a.example",)))
    answer = on.http.options("/v1/chat/completions", headers=preflight)
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    refused = on.http.get("/v1/models", headers={"Origin": "https://a.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"
