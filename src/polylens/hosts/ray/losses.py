"""Replicas that are gone, or going: how that is noticed, and how often another one is asked instead."""

from __future__ import annotations

from ray.exceptions import RayActorError
from ray.serve.exceptions import ReplicaUnavailableError

from polylens.errors import PolylensError

ATTEMPTS = 4
"""Replicas asked in turn before the client is told: a request that kills what answers it must not kill them all."""


class ReplicaUnfitError(PolylensError):
    """This replica cannot answer any more, and is about to be replaced: another one may."""


LOST = (RayActorError, ReplicaUnavailableError, ReplicaUnfitError)
"""What says that a replica is gone, or going, and not that something is wrong with the request."""
