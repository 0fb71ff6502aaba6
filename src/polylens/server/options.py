"""How the server behaves, as one frozen value; `cli/serve.py` makes it of the command line's flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polylens.config import MAX_QUEUE as MAX_QUEUE
from polylens.config import MIB

MAX_BODY_BYTES = 64 * MIB
"""Largest request body: three pictures of a phone's camera as base64, or a short video."""

MAX_BODIES_BYTES = 1024 * MIB
"""Bytes of all bodies that are being received or answered: what strangers can make the server hold."""

BODY_TIMEOUT_S = 120.0
"""Longest time a client may take to send its body: 64 MiB over a slow line, but not for ever."""

MAX_IMAGES = 32
MAX_VIDEOS = 4
"""Pictures and videos of one request unless `--limit-mm-per-prompt` says otherwise."""

MAX_CHOICES = 128
"""OpenAI's own bound of `n`."""

DRAIN_S = 30.0
"""Seconds that running requests get to finish after SIGTERM: what container managers wait before SIGKILL."""


@dataclass(frozen=True)
class AdapterPolicy:
    """Who may load adapters while the server runs, and from where.

    root: loads take folders below this one only, its symlinks and ".." resolved first; None: no folder at all.
    hub: whether a load may name a hub id.
    """

    loading: bool = False
    root: Path | None = None
    hub: bool = False


@dataclass(frozen=True)
class MediaPolicy:
    """Where the pictures and videos of requests may come from; `data:` URLs always may.

    local_root: folder whose files `file://` URLs may name; None: none. remote: whether http(s) addresses are
    fetched; domains: only from these hosts (empty: any public one). max_bytes: of one fetched file.
    """

    local_root: Path | None = None
    remote: bool = False
    domains: tuple[str, ...] = ()
    max_bytes: int = MAX_BODY_BYTES
    timeout_s: float = 15.0
    max_images: int = MAX_IMAGES
    max_videos: int = MAX_VIDEOS


@dataclass(frozen=True)
class ServerOptions:
    """api_keys: any of them opens the API; empty: no key is asked for. admin_keys: open loading and unloading (and
    the rest); empty: nobody may, if there are api_keys. deadline_s: the longest a request may take; None: no limit.
    sampling: the defaults of fields that a request leaves out. default_adapters: "image" or "video" -> adapter of
    requests that name the base and have such media. log_prompts: write prompts into the log.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    adapters: AdapterPolicy = AdapterPolicy()
    media: MediaPolicy = MediaPolicy()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    default_adapters: Mapping[str, str] = field(default_factory=dict)
    max_body_bytes: int = MAX_BODY_BYTES
    deadline_s: float | None = None
    drain_s: float = DRAIN_S
    cors_origins: tuple[str, ...] = ()
    log_prompts: bool = False
