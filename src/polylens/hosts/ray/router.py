"""Ray's choice of a replica for a request: by its adapter and its pictures, within bounded load."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from ray.serve.request_router import MultiplexMixin, RequestRouter

from polylens.hosts.ray.affinity import NOTHING, Affinity, ranked
from polylens.hosts.ray.wire import Call

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, RunningReplica


class AffinityRouter(MultiplexMixin, RequestRouter):
    """Which replica has which adapter is what replicas report to Ray (`serve.multiplexed`).

    What a request shares is read from its Call, and not named to Ray as the multiplexed model id: a router keeps every
    request that has one, with its body, for as long as it lives (Ray 2.60, `_pending_requests_by_model_id`). A replica
    that is full, or already gone, is passed over for the next best one.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All candidates, best first, each a rank of its own: they are asked in this order."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        affinity = affinity_of(pending_request)
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        lengths = {
            name: self.replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in replicas.items()
        }
        holding = self._multiplexed_model_id_to_replica_ids.get(affinity.adapter, ())
        holders = {replica.unique_id for replica in holding}
        return [[replicas[name]] for name in ranked(affinity, lengths, holders)]


class RandomRouter(RequestRouter):
    """Any replica: what the affinity of the other is compared with."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All candidates in a random order."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [[replica] for replica in random.sample(candidate_replicas, len(candidate_replicas))]


def affinity_of(pending: PendingRequest) -> Affinity:
    """What a request shares with others; nothing if it is no call of ours."""
    return next((given.affinity for given in pending.args if isinstance(given, Call)), NOTHING)


ROUTERS = {"affinity": AffinityRouter, "random": RandomRouter}
"""By `Settings.routing`; Ray's own for the others."""
