"""`polylens serve`: an OpenAI-compatible server over one model and its adapters."""

from __future__ import annotations

import dataclasses
import logging
import sys
from typing import TYPE_CHECKING

import typer

from polylens.cli.serve_flags import make_parser, unneeded_flags
from polylens.cli.serve_options import (
    adapters_named,
    check_names,
    engine_config,
    folder_named,
    model_or_demo,
    server_options,
    template_in,
)

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from polylens.config import EngineConfig
    from polylens.server.options import ServerOptions


def serve(context: typer.Context) -> None:
    """Serve a model and its adapters over HTTP."""
    arguments = make_parser().parse_args(context.args)
    for flag in unneeded_flags(arguments):
        print(f"polylens: --{flag.name}: {flag.help}", file=sys.stderr)
    config = engine_config(arguments)
    options = server_options(arguments)
    adapters = adapters_named(arguments)
    folder = folder_named(arguments.lora_dir, "--lora-dir")
    template = template_in(arguments.chat_template)
    _serve(arguments, config, options, adapters, folder, template)


def _serve(
    arguments: argparse.Namespace,
    config: EngineConfig,
    options: ServerOptions,
    adapters: dict[str, str],
    folder: Path | None,
    template: str | None,
) -> None:
    from polylens.server.run import listen, serve

    logging.basicConfig(level=arguments.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    listener = listen(arguments.host, arguments.port)  # before anything that takes long
    from polylens.models.loading import load_model
    from polylens.server.app import build_app
    from polylens.server.service import Service
    from polylens.server.start import adapters_below, model_defaults, start, stated_defaults

    lazy = adapters_below(folder) if folder is not None else {}
    check_names(options, adapters, lazy)
    stated = stated_defaults(arguments.generation_config)
    loaded = load_model(model_or_demo(arguments.model), config, template)
    defaults = stated if stated is not None else model_defaults(loaded)
    options = dataclasses.replace(options, sampling={**defaults, **options.sampling})
    thread = start(loaded, config, adapters, max_queue=arguments.max_queue, lazy=lazy)
    host, port = listener.getsockname()[:2]
    names = ", ".join([*options.model_names, *adapters])
    names += f" and {len(lazy)} adapters below {folder}" if lazy else ""
    shown = f"[{host}]" if ":" in host else host

    def ready() -> None:
        print(f"polylens: serving {names} at http://{shown}:{port}", flush=True)

    serve(
        lambda: build_app(Service(thread, options)),
        thread,
        listener,
        drain_s=options.drain_s,
        log_level=arguments.log_level,
        on_ready=ready,
    )
