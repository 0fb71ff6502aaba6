"""Ray's choice of a replica for a request: by its adapter and its pictures, within bounded load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray.serve.request_router import MultiplexMixin, RequestRouter

from polylens.hosts.ray.affinity import Affinity, ranked

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, RunningReplica


class AffinityRouter(MultiplexMixin, RequestRouter):
    """The model id of Ray's multiplexing is the adapter's name, the session id is the hash of the media.

    Which replica has which adapter is what replicas report to Ray (`serve.multiplexed`). A replica that is full, or
    already gone, is passed over for the next best one.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All candidates, best first, each a rank of its own: they are asked in this order."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        metadata = pending_request.metadata
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        lengths = {
            name: self.replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in replicas.items()
        }
        holding = self._multiplexed_model_id_to_replica_ids.get(metadata.multiplexed_model_id, ())
        holders = {replica.unique_id for replica in holding}
        affinity = Affinity(metadata.multiplexed_model_id, metadata.session_id)
        return [[replicas[name]] for name in ranked(affinity, lengths, holders)]
