"""`polylens deploy`: several replicas of the server behind one address, under Ray Serve."""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING

import typer

from polylens.cli.serve_flags import Flag, add_flags, make_parser
from polylens.cli.serve_options import (
    adapters_named,
    check_at_least,
    check_names,
    engine_config,
    folder_named,
    model_or_demo,
    server_options,
    template_in,
)

if TYPE_CHECKING:
    from polylens.hosts.ray.settings import Settings


def deploy(context: typer.Context) -> None:
    """Serve a model and its adapters with several replicas."""
    arguments = deploy_parser().parse_args(context.args)
    logging.basicConfig(level=arguments.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    settings = settings_of(arguments)
    from polylens.hosts.ray.deploy import Cluster, deploy

    cluster = Cluster(arguments.address, arguments.object_store_bytes)

    def ready() -> None:
        names = ", ".join([*settings.server.model_names, *settings.adapters])
        print(f"polylens: serving {names} at http://{arguments.host}:{arguments.port}", flush=True)

    deploy(settings, cluster, arguments.host, arguments.port, ready)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The deployment that the flags ask for. Raises RequestError."""
    from polylens.hosts.ray.settings import Settings, below

    for name in ("target_requests", "object_store_bytes"):
        check_at_least(arguments, name, 1)
    options = server_options(arguments)
    adapters = adapters_named(arguments)
    folder = folder_named(arguments.lora_dir, "--lora-dir")
    lazy = below(folder) if folder is not None else {}
    check_names(options, adapters, lazy)
    return Settings(
        model=model_or_demo(arguments.model),
        replicas=arguments.replicas,
        max_replicas=arguments.max_replicas,
        target_requests=arguments.target_requests,
        ingresses=arguments.ingresses,
        adapters=adapters,
        lazy=lazy,
        adapters_per_replica=arguments.adapters_per_replica,
        cpus=arguments.cpus_per_replica,
        gpus=arguments.gpus_per_replica,
        routing=arguments.routing,
        max_queue=arguments.max_queue,
        chat_template=template_in(arguments.chat_template),
        generation_config=arguments.generation_config,
        engine=engine_config(arguments),
        server=options,
    )


def deploy_parser() -> argparse.ArgumentParser:
    """The flags of `polylens serve`, and those of the replicas."""
    parser = make_parser()
    parser.prog = "polylens deploy"
    parser.usage = "polylens deploy [MODEL] --replicas N [options]"
    parser.description = "Serve a model and its adapters with several replicas behind one address, under Ray Serve."
    add_flags(parser.add_argument_group("Replicas"), _replica_flags())
    return parser


def _replica_flags() -> tuple[Flag, ...]:
    from polylens.hosts.ray.deploy import OBJECT_STORE_BYTES
    from polylens.hosts.ray.settings import ADAPTERS_PER_REPLICA, TARGET_REQUESTS

    return (
        Flag("replicas", "Engines; the fewest, with --max-replicas.", "N", int, 1),
        Flag("max-replicas", "Add replicas up to so many while requests queue.", "N", int),
        Flag(
            "target-requests", "Requests in flight a replica, that --max-replicas aims at.", "N", int, TARGET_REQUESTS
        ),
        Flag("ingresses", "Processes that receive requests.", "N", int, 1),
        Flag("cpus-per-replica", "CPUs of a replica.", "N", float, 1.0),
        Flag("gpus-per-replica", "GPUs of a replica.", "N", float, 0.0),
        Flag(
            "adapters-per-replica",
            "Adapters a replica counts as having, the latest ones.",
            "N",
            int,
            ADAPTERS_PER_REPLICA,
        ),
        Flag(
            "routing",
            "affinity: where the adapter and the picture are. To compare with: balanced, the shortest queue; random.",
            "RULE",
            default="affinity",
            choices=("affinity", "balanced", "random"),
        ),
        Flag("address", "A Ray cluster to run on; auto: this machine's. Not said: start one.", "HOST:PORT"),
        Flag("object-store-bytes", "Shared memory of the Ray that is started.", "BYTES", int, OBJECT_STORE_BYTES),
    )
