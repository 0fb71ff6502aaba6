"""Keep what Ray opens on this machine's loopback, where the Ray is on it."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


def stay_on_loopback() -> None:
    """In a replica's process, before Ray opens the replica's port for calls between deployments.

    That one is opened on all interfaces whatever address the node has (Ray 2.60), though it is not used here: calls
    between our deployments are Ray's own.
    """
    import ray
    from ray.serve._private import replica

    if ray.util.get_node_ip_address() != LOOPBACK:
        return
    opened: Any = getattr(replica, "add_port_to_grpc_server", None)
    if opened is None:
        log.warning("this Ray opens its replicas' ports in another way: look which interfaces they are on")
        return

    def on_loopback(server: Any, address: str) -> int:
        return int(opened(server, address.replace("[::]", LOOPBACK)))

    replica.add_port_to_grpc_server = on_loopback
