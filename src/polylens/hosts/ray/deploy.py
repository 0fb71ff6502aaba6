"""Run the application: on a Ray of its own on this machine, or on a cluster that is there."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polylens.config import MIB
from polylens.errors import ModelLoadError, PolylensError
from polylens.hosts.ray.loopback import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Callable

    from polylens.hosts.ray.settings import Settings

log = logging.getLogger(__name__)

APPLICATION = "polylens"

OBJECT_STORE_BYTES = 512 * MIB
"""Shared memory of a Ray of our own: bodies of requests on their way to a replica."""


@dataclass(frozen=True)
class Cluster:
    """address: of a running Ray ("auto" for this machine's); None: start one that ends with us, on loopback.

    object_store_bytes: shared memory of the one that is started.
    """

    address: str | None = None
    object_store_bytes: int = OBJECT_STORE_BYTES


def deploy(settings: Settings, cluster: Cluster, host: str, port: int, on_ready: Callable[[], None]) -> None:
    """Start it, call `on_ready`, and serve until SIGINT or SIGTERM. Raises PolylensError if it cannot start."""
    begin(settings, cluster, host, port)
    ray, serve = _ray()
    stop = threading.Event()
    try:
        for kind in (signal.SIGINT, signal.SIGTERM):
            signal.signal(kind, lambda *_: stop.set())
        on_ready()
        stop.wait()
    finally:
        # On a cluster that is not ours, only the application is.
        serve.delete(APPLICATION)
        if cluster.address is None:
            serve.shutdown()
        ray.shutdown()


def begin(settings: Settings, cluster: Cluster, host: str, port: int) -> None:
    """Connect to Ray or start it, and have the application running. Raises PolylensError."""
    if cluster.address is None:
        # Ray reads this when it is imported: on loopback nobody else reaches its ports.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray, serve = _ray()
    from polylens.hosts.ray.app import application

    if cluster.address is None:
        _start(ray, settings, cluster)
    else:
        ray.init(cluster.address, namespace="serve", log_to_driver=False)
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(application(settings), name=APPLICATION)
    except RuntimeError as error:  # Ray's word for a deployment that does not become healthy
        ray.shutdown()
        raise ModelLoadError(f"the replicas do not start; see Ray's logs below /tmp/ray: {error}") from error


def _start(ray: Any, settings: Settings, cluster: Cluster) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody unless asked for
    ray.init(
        num_cpus=max(math.ceil(settings.cpus * settings.most_replicas), os.cpu_count() or 1),
        namespace="serve",
        include_dashboard=False,
        object_store_memory=cluster.object_store_bytes,
        log_to_driver=False,
        _node_ip_address=LOOPBACK,
    )
    if ray.util.get_node_ip_address() != LOOPBACK:
        log.warning("Ray was imported before, and is not on loopback: its ports are open to the network")


def _ray() -> tuple[Any, Any]:
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise PolylensError(f"replicas need Ray Serve: pip install 'polylens[ray]' ({error})") from error
    return ray, serve
