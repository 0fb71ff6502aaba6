"""`polylens deploy`: several replicas of the server behind one address, under Ray Serve."""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING

import typer

from polylens.cli.serve_flags import make_parser
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
    from polylens.hosts.ray.deploy import OBJECT_STORE_BYTES
    from polylens.hosts.ray.settings import ADAPTERS_PER_REPLICA, TARGET_REQUESTS

    parser = make_parser()
    parser.prog = "polylens deploy"
    parser.usage = "polylens deploy [MODEL] --replicas N [options]"
    parser.description = "Serve a model and its adapters with several replicas behind one address, under Ray Serve."
    group = parser.add_argument_group("Replicas")
    add = group.add_argument
    add("--replicas", type=int, default=1, metavar="N", help="Engines; the fewest, with --max-replicas. Default: 1.")
    add("--max-replicas", type=int, metavar="N", help="Add replicas up to so many while requests queue.")
    add(
        "--target-requests",
        type=int,
        default=TARGET_REQUESTS,
        metavar="N",
        help=f"Requests in flight a replica, that --max-replicas aims at. Default: {TARGET_REQUESTS}.",
    )
    add("--ingresses", type=int, default=1, metavar="N", help="Processes that receive requests. Default: 1.")
    add("--cpus-per-replica", type=float, default=1.0, metavar="N", help="CPUs of a replica. Default: 1.")
    add("--gpus-per-replica", type=float, default=0.0, metavar="N", help="GPUs of a replica. Default: 0.")
    add(
        "--adapters-per-replica",
        type=int,
        default=ADAPTERS_PER_REPLICA,
        metavar="N",
        help=f"Adapters a replica counts as having, the latest ones. Default: {ADAPTERS_PER_REPLICA}.",
    )
    add(
        "--routing",
        choices=("affinity", "balanced"),
        default="affinity",
        help="affinity: where the adapter and the picture are; balanced: to the shortest queue, to compare with.",
    )
    add("--address", metavar="HOST:PORT", help="A Ray cluster to run on; auto: this machine's. Not said: start one.")
    add(
        "--object-store-bytes",
        type=int,
        default=OBJECT_STORE_BYTES,
        metavar="BYTES",
        help=f"Shared memory of the Ray that is started. Default: {OBJECT_STORE_BYTES}.",
    )
    return parser
