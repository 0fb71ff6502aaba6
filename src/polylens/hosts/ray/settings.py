"""What a deployment is made of, as one frozen value that travels to every replica."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from polylens.config import EngineConfig
from polylens.errors import RequestError
from polylens.server.options import MAX_QUEUE, AdapterPolicy, MediaPolicy, ServerOptions
from polylens.server.start import adapters_below

ADAPTERS_PER_REPLICA = 128
"""Adapters that a replica tells Ray it holds: so many of rank 16 fit a few GB beside a 7B model."""

TARGET_REQUESTS = 32
"""Requests in flight for each replica that autoscaling aims at: half of those that run together."""

API_KEYS_VARIABLE = "POLYLENS_API_KEYS"
ADMIN_KEYS_VARIABLE = "POLYLENS_ADMIN_API_KEYS"


@dataclass(frozen=True)
class Settings:
    """model: folder or hub id; every node must reach it, and the adapters, under the same path.

    replicas: engines; with `max_replicas`, the fewest, and Ray adds and removes some so that each has about
    `target_requests` in flight. ingresses: processes that receive requests. adapters: loaded at the start, name ->
    path. lazy: read when first asked for. cpus, gpus: of one replica, as Ray counts them. routing: to compare with,
    "balanced" sends requests to the shortest queue and "random" anywhere, whatever is where. chat_template: its text.
    generation_config: as the server's flag.
    """

    model: str
    replicas: int = 1
    max_replicas: int | None = None
    target_requests: int = TARGET_REQUESTS
    ingresses: int = 1
    adapters: Mapping[str, str] = field(default_factory=dict)
    lazy: Mapping[str, Path] = field(default_factory=dict)
    adapters_per_replica: int = ADAPTERS_PER_REPLICA
    cpus: float = 1.0
    gpus: float = 0.0
    routing: Literal["affinity", "balanced", "random"] = "affinity"
    max_queue: int = MAX_QUEUE
    chat_template: str | None = None
    generation_config: str = "auto"
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerOptions = field(default_factory=lambda: ServerOptions(()))

    def __post_init__(self) -> None:
        for name in ("replicas", "ingresses", "target_requests", "adapters_per_replica", "max_queue"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("cpus", "gpus"):
            if getattr(self, name) < 0:
                raise RequestError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise RequestError(f"max_replicas ({self.max_replicas}) is below replicas ({self.replicas})")

    @property
    def most_replicas(self) -> int:
        return self.max_replicas or self.replicas

    @property
    def requests_per_replica(self) -> int:
        """Requests a replica takes at a time: those that run, and as many that are being prepared."""
        return 2 * self.engine.max_running


def settings_of(arguments: Mapping[str, Any]) -> Settings:
    """The settings that a config file's `args` (or `key=value` of `serve run`) say. Raises RequestError.

    Keys are the fields of `Settings`, with `lora_dir` in place of `lazy`; `engine` and `server` hold those of
    EngineConfig and ServerOptions. Keys of the API come from the environment where none are given.
    """
    given = dict(arguments)
    folder = given.pop("lora_dir", None)
    server = {"model_names": (given.get("model"),), **(given.pop("server", None) or {})}
    given["server"] = {**_keys_of_environment(), **server}
    _check_keys(given, Settings, "")
    try:
        settings = TypeAdapter(Settings).validate_python(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise RequestError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    return settings if folder is None else dataclasses.replace(settings, lazy=below(Path(folder)))


def below(folder: Path) -> dict[str, Path]:
    """The adapters below a folder, as found now: replicas that start later have the same. Raises RequestError."""
    if not folder.is_dir():
        raise RequestError(f"lora_dir: no such folder: {folder}")
    return adapters_below(folder.resolve())


_PARTS: dict[str, type] = {
    "engine": EngineConfig,
    "server": ServerOptions,
    "server.adapters": AdapterPolicy,
    "server.media": MediaPolicy,
}
"""Where a key holds the fields of another class."""


def _check_keys(given: Any, kind: type, place: str) -> None:
    """Raise RequestError for a key that is no field: pydantic would pass over it."""
    if not isinstance(given, Mapping):
        return  # of the wrong form, which is said elsewhere
    names = {one.name for one in dataclasses.fields(kind)}
    for key, value in given.items():
        where = f"{place}.{key}" if place else str(key)
        if key not in names:
            raise RequestError(f"{where!r} is no setting; known: {', '.join(sorted(names))}")
        if where in _PARTS:
            _check_keys(value, _PARTS[where], where)


def _keys_of_environment() -> dict[str, tuple[str, ...]]:
    found = {"api_keys": API_KEYS_VARIABLE, "admin_keys": ADMIN_KEYS_VARIABLE}
    keys = {name: os.environ.get(variable, "").split(",") for name, variable in found.items()}
    return {name: tuple(filter(None, map(str.strip, some))) for name, some in keys.items()}
