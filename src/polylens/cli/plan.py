"""`polylens plan`: how memory would be divided for a model on this machine."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from polylens.cli.options import (
    DeviceOption,
    DType,
    DTypeOption,
    JsonOption,
    KvBytesOption,
    MaxModelLenOption,
    ModelArgument,
    TrustOption,
)


def plan(
    model: ModelArgument,
    json_output: JsonOption = False,
    dtype: DTypeOption = DType.AUTO,
    device: DeviceOption = "cpu",
    max_model_len: MaxModelLenOption = None,
    kv_bytes: KvBytesOption = None,
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
    trust_remote_code: TrustOption = False,
) -> None:
    """Load a model, measure what its encoder and text model need, and show what is left for caches and adapters.

    What the options name is taken as given; the rest follows. `polylens serve` with the same options plans alike.
    """
    from polylens import LLM
    from polylens.config import EngineConfig

    config = EngineConfig(
        dtype=dtype.value,
        device=device,
        max_model_len=max_model_len,
        kv_bytes=kv_bytes,
        vision_cache_bytes=vision_cache_bytes,
        adapter_device_bytes=adapter_device_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
        trust_remote_code=trust_remote_code,
        show_progress=sys.stderr.isatty(),
    )
    with LLM(model, config=config) as llm:
        found = llm.engine.plan
    typer.echo(json.dumps(found.to_json()) if json_output else "\n".join(found.lines()))
