"""`polylens plan`: how memory would be divided for a model on this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer

from polylens.cli.options import JsonOption, ModelArgument, model_config, takes
from polylens.config import EngineConfig


@takes(model_config)
def plan(
    config: EngineConfig,
    model: ModelArgument,
    json_output: JsonOption = False,
    vision_cache_bytes: Annotated[
        int | None, typer.Option("--vision-cache-bytes", min=0, metavar="BYTES", help="Memory for features of media.")
    ] = None,
    adapter_device_bytes: Annotated[
        int | None,
        typer.Option("--adapter-device-bytes", min=1, metavar="BYTES", help="Memory for adapters on the device."),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option("--gpu-memory-utilization", metavar="PART", help="Part of the GPU's memory to use (0.9)."),
    ] = None,
) -> None:
    """Load a model, measure what its encoder and text model need, and show what is left for caches and adapters.

    What the options name is taken as given; the rest follows. `polylens serve` with the same options plans alike.
    """
    from polylens import LLM

    config = replace(
        config,
        vision_cache_bytes=vision_cache_bytes,
        adapter_device_bytes=adapter_device_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    with LLM(model, config=config) as llm:
        found = llm.engine.plan
    typer.echo(json.dumps(found.to_json()) if json_output else "\n".join(found.lines()))
