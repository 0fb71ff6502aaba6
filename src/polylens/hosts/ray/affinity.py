"""Where a request is best answered: what it shares with others, and which replica that means."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from polylens.server.options import ServerOptions

Replica = TypeVar("Replica", bound=Hashable)

LOAD_FACTOR = 1.25
SLACK = 2
"""A replica counts as busy with more than LOAD_FACTOR times the mean of requests in flight plus SLACK: what an adapter
or a picture saves is worth a little waiting, and no more ("consistent hashing with bounded loads")."""


@dataclass(frozen=True)
class Affinity:
    """adapter: its name, "" for the base model. media: what its pictures and videos hash to, "" without any."""

    adapter: str = ""
    media: str = ""


NOTHING = Affinity()
"""Of a request that shares nothing."""


def affinity_of(raw: bytes, options: ServerOptions) -> Affinity:
    """What the body of a request shares with others. Never raises: what is wrong with it, its replica will say."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return NOTHING
    if not isinstance(body, dict):
        return NOTHING
    model, media = body.get("model"), _media(body.get("messages"))
    if not isinstance(model, str):
        return Affinity(media=_digest(media))
    if model not in options.model_names:
        return Affinity(model, _digest(media))
    kinds = {kind for kind, _ in media}
    default = next((name for kind, name in options.default_adapters.items() if kind in kinds), "")
    return Affinity(default, _digest(media))


def _media(messages: Any) -> list[tuple[str, str]]:
    """Kind and address of every picture and video of a chat."""
    found = []
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in ("image_url", "video_url"):
                given = part.get(kind)
                url = given.get("url") if isinstance(given, dict) else given
                found.append((kind.removesuffix("_url"), str(url)))
    return found


def _digest(media: Sequence[tuple[str, str]]) -> str:
    if not media:
        return ""
    digest = blake2b(digest_size=16)
    for _, url in media:
        digest.update(url.encode(errors="replace") + b"\n")
    return digest.hexdigest()


def ranked(affinity: Affinity, replicas: Mapping[Replica, int], holders: Collection[Replica]) -> list[Replica]:
    """All replicas, best first. replicas: with their requests in flight. holders: those that have the adapter.

    Those that are not busy come first; among them those with the adapter, and among these the media decide, by
    rendezvous hashing: the same in every router, and a replica that goes moves only what it had.
    """
    limit = LOAD_FACTOR * sum(replicas.values()) / max(len(replicas), 1) + SLACK

    def place(replica: Replica) -> tuple[bool, bool, int]:
        holds = not affinity.adapter or replica in holders
        # Who does not have the adapter yet: one of them for all its requests, whatever their pictures.
        key = f"{affinity.adapter}/{affinity.media}" if holds else affinity.adapter
        return replicas[replica] > limit, not holds, weight(key, str(replica))

    if affinity == NOTHING:
        return sorted(replicas, key=lambda replica: replicas[replica])
    return sorted(replicas, key=place)


def weight(key: str, replica: str) -> int:
    """Rendezvous hashing: of all replicas, the one with the least weight has the key."""
    return int.from_bytes(blake2b(f"{key}\n{replica}".encode(errors="replace"), digest_size=8).digest())
