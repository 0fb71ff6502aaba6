"""Which replica a request should go to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polylens.hosts.ray.affinity import LOAD_FACTOR, SLACK, Affinity, affinity_of, ranked
from polylens.server.options import ServerOptions

OPTIONS = ServerOptions(("base", "other-name"), default_adapters={"image": "pictures"})
IDLE = dict.fromkeys("abcdefgh", 0)


def body(model: str, *urls: str) -> bytes:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts.append({"type": "text", "text": "what?"})
    return json.dumps({"model": model, "messages": [{"role": "user", "content": parts}]}).encode()


def test_the_model_and_the_pictures_count_and_the_text_does_not():
    one, other = (
        affinity_of(body("gauges", "data:a", "data:b"), OPTIONS),
        affinity_of(body("gauges", "data:a"), OPTIONS),
    )
    assert one.adapter == other.adapter == "gauges"
    assert one.media != other.media
    assert one == affinity_of(body("gauges", "data:a", "data:b").replace(b"what?", b"which?"), OPTIONS)
    assert affinity_of(body("gauges"), OPTIONS) == Affinity("gauges")


def test_an_address_as_a_plain_string_is_the_same_picture():
    plain = json.dumps({"model": "x", "messages": [{"content": [{"type": "image_url", "image_url": "data:a"}]}]})
    assert affinity_of(plain.encode(), OPTIONS) == affinity_of(body("x", "data:a"), OPTIONS)


def test_names_of_the_base_model_are_no_adapter():
    assert affinity_of(body("other-name"), OPTIONS) == Affinity()
    assert affinity_of(body("base", "data:a"), OPTIONS).adapter == "pictures"  # --default-adapter


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"messages": 3}', b'{"messages": [3, {"content": [3]}]}'],
)
def test_a_wrong_body_has_no_affinity_and_no_error(raw: bytes):
    assert affinity_of(raw, OPTIONS) == Affinity()


def test_all_requests_of_a_new_adapter_go_to_one_replica_whatever_their_picture():
    firsts = {ranked(Affinity("gauges", media), IDLE, ())[0] for media in "123456"}
    assert len(firsts) == 1


def test_among_those_that_have_the_adapter_the_picture_decides():
    holders = {"b", "e", "g"}
    firsts = [ranked(Affinity("gauges", str(media)), IDLE, holders)[0] for media in range(40)]
    assert set(firsts) == holders
    assert firsts == [ranked(Affinity("gauges", str(media)), IDLE, holders)[0] for media in range(40)]


def test_a_busy_replica_is_passed_over_and_stays_in_the_list():
    best = ranked(Affinity("gauges"), IDLE, {"c"})[0]
    assert best == "c"
    # The mean of eight is an eighth of it.
    enough = int(SLACK / (1 - LOAD_FACTOR / 8)) + 1
    order = ranked(Affinity("gauges"), {**IDLE, "c": enough}, {"c"})
    assert order[-1] == "c"
    assert ranked(Affinity("gauges"), {**IDLE, "c": SLACK}, {"c"})[0] == "c"


def test_without_anything_to_share_the_shortest_queue_is_first():
    assert ranked(Affinity(), {"a": 3, "b": 1, "c": 2}, ()) == ["b", "c", "a"]


def test_a_replica_that_goes_moves_only_what_it_had():
    before = {name: ranked(Affinity(str(name)), IDLE, ())[0] for name in range(200)}
    fewer = {replica: 0 for replica in IDLE if replica != "d"}
    moved = [name for name, first in before.items() if ranked(Affinity(str(name)), fewer, ())[0] != first]
    assert moved == [name for name, first in before.items() if first == "d"]
    assert 8 < len(moved) < 50  # about an eighth
