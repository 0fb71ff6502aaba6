"""`polylens merge`: write a model with one adapter merged into its weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from polylens.cli.options import JsonOption, TrustOption


def merge(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The base model: a local folder or a hub id.")],
    adapter: Annotated[str, typer.Option("--adapter", metavar="PATH", help="The adapter: a local folder or a hub id.")],
    output: Annotated[str, typer.Option("--output", metavar="DIR", help="Folder to write; new or empty.")],
    json_output: JsonOption = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Write MODEL with the adapter merged into its weights, shard by shard.

    Memory: about one shard. All that the adapter's files hold is merged, or nothing is written.
    """
    from polylens.engine.merge_checkpoint import merge_checkpoint

    report = merge_checkpoint(model, adapter, output, trust_remote_code=trust_remote_code)
    if json_output:
        plain = asdict(report) | {"adapter": report.adapter.to_json()}
        typer.echo(json.dumps(plain, ensure_ascii=False, default=str))
        return
    typer.echo(
        f"wrote {report.output}: {report.num_changed} of {report.num_tensors} tensors changed, "
        f"{report.num_shards} shard{'s' if report.num_shards != 1 else ''}"
    )
    if report.untied:
        typer.echo("the head has its own weights now (it was tied to the embeddings)")
