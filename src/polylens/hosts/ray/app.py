"""The deployments, bound together: an ingress, the replicas, and the desk that keeps their adapters alike."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from polylens.hosts.ray.desk import Desk
from polylens.hosts.ray.engine import EngineReplica
from polylens.hosts.ray.ingress import Ingress
from polylens.hosts.ray.router import ROUTERS
from polylens.hosts.ray.settings import Settings

ENGINE = "Engine"

MANY = 100_000
"""For deployments that only pass on and wait: what bounds requests are the replicas and the queue before them."""

HEALTH_PERIOD_S = 5.0


def application(settings: Settings) -> Application:
    """The application, for `serve.run`."""
    desk = serve.deployment(
        Desk, name="Desk", num_replicas=1, max_ongoing_requests=MANY, ray_actor_options={"num_cpus": 0}
    ).bind(ENGINE)
    engine = _engine(settings).bind(settings, desk)
    ingress = serve.deployment(
        Ingress,
        name="Ingress",
        num_replicas=settings.ingresses,
        max_ongoing_requests=MANY,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=settings.server.drain_s,
    )
    return ingress.bind(settings, engine, desk)


def _engine(settings: Settings) -> Any:
    return serve.deployment(
        EngineReplica,
        name=ENGINE,
        max_ongoing_requests=settings.requests_per_replica,
        max_queued_requests=settings.max_queue,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        graceful_shutdown_timeout_s=settings.server.drain_s,
        health_check_period_s=HEALTH_PERIOD_S,
        **_number(settings),
        **_routing(settings),
    )


def _routing(settings: Settings) -> dict[str, Any]:
    """How a replica is chosen; nothing for Ray's own way."""
    router = ROUTERS.get(settings.routing)
    return {} if router is None else {"request_router_config": RequestRouterConfig(request_router_class=router)}


def _number(settings: Settings) -> dict[str, Any]:
    """How many replicas: fixed, or by the requests that wait and run."""
    if settings.max_replicas is None:
        return {"num_replicas": settings.replicas}
    return {
        "autoscaling_config": {
            "min_replicas": settings.replicas,
            "max_replicas": settings.max_replicas,
            "target_ongoing_requests": settings.target_requests,
        }
    }
