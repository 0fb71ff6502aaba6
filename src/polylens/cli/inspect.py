"""`polylens inspect`: what is in an adapter, and whether it fits a model; or what polylens makes of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polylens.cli.options import JsonOption, TrustOption

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polylens.adapters.describe import AdapterDescription
    from polylens.core import ModelLayers
    from polylens.engine.describe_model import ModelDescription


def inspect(
    adapter: Annotated[
        str,
        typer.Argument(metavar="ADAPTER", help="A PEFT LoRA adapter: a local folder or a hub id. Or a model's folder."),
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="The base model to check it against. Its weights are not read."),
    ] = None,
    json_output: JsonOption = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Show an adapter's options, ranks, sizes and digests, and what of it would be refused and why.

    With --model: which modules match and to which part of the model they belong. Exit code 1 if the adapter
    would be refused, 2 if there is nothing to show (no such folder, broken files).

    Of a model's folder: how it would be run (adapters mixed, or by transformers and why), and what adapters may change.
    """
    if model is None and _is_model(adapter):
        _inspect_model(adapter, json_output, trust_remote_code)
        return
    from polylens.adapters.describe import describe_adapter

    described = describe_adapter(adapter, _layers(model, trust_remote_code))
    if json_output:
        typer.echo(json.dumps(described.to_json(), ensure_ascii=False, default=list))
    else:
        typer.echo("\n".join(_lines(described)))
    if described.loads is False:
        raise typer.Exit(1)


def _is_model(path: str) -> bool:
    folder = Path(path).expanduser()
    return (folder / "config.json").is_file() and not (folder / "adapter_config.json").exists()


def _inspect_model(model: str, json_output: bool, trust_remote_code: bool) -> None:
    from polylens.engine.describe_model import describe_model

    described = describe_model(model, trust_remote_code=trust_remote_code)
    text = json.dumps(described.to_json(), ensure_ascii=False) if json_output else "\n".join(_model_lines(described))
    typer.echo(text)


def _model_lines(described: ModelDescription) -> Iterator[str]:
    yield f"model       {described.model}"
    yield f"type        {described.model_type} ({described.model_class}), {described.num_parameters:,} parameters"
    yield f"level       {described.level}" + (f": {described.reason}" if described.reason else "")
    pictures = ("pictures",) if described.takes_pictures else ()
    media = (*pictures, "videos" if described.takes_videos else "videos as frames")
    yield f"takes       text{', '.join(('', *media)) if described.takes_media else ''}"
    for component, part in described.components.items():
        if part.num_layers:
            counts = ", ".join(f"{count} {kind}" for kind, count in part.num_layers.items())
            rules = f"; rows by {', '.join(part.row_rules)}" if part.row_rules else ""
            yield f"  {component:<16} {counts}{rules}"
    yield from (f"no effect   {name}" for name in described.no_effect)
    yield from (f"refused     {name}: {reason}" for name, reason in described.refused.items())


def _layers(model: str | None, trust_remote_code: bool) -> ModelLayers | None:
    if model is None:
        return None
    from polylens.models.outline import outline_model

    return outline_model(model, trust_remote_code=trust_remote_code)


def _lines(described: AdapterDescription) -> Iterator[str]:
    yield f"adapter     {described.path}"
    dtypes = ", ".join(described.dtypes)
    yield f"tensors     {described.num_tensors} ({dtypes}), {described.num_parameters:,} parameters"
    yield f"layers      {len(described.layers)}, ranks {_joined(described.ranks)}"
    if described.options is not None:
        yield from _option_lines(described)
    if described.processing_files:
        yield f"processor   {', '.join(described.processing_files)}"
    if described.components is not None:
        yield f"model       {described.model_type}"
        for component, part in described.components.items():
            yield (
                f"  {component:<16} {part.num_layers} layers, {part.num_parameters:,} parameters, "
                f"rank {_joined(part.ranks)}, scaling {_joined(part.scalings)}"
            )
    if described.digests is not None:
        yield f"digest      {described.digests.whole}"
    if described.components is not None:
        yield "modules"
        yield from (f"  {layer.layer}  rank {layer.rank}" for layer in described.layers)
    yield from (f"refused     {refusal.option}: {refusal.reason}" for refusal in described.refused)
    yield from (f"problem     {problem}" for problem in described.problems)
    yield from (f"warning     {warning}" for warning in described.warnings)
    yield f"loads       {_VERDICTS[described.loads]}"


_VERDICTS = {True: "yes", False: "no", None: "give --model to find out"}


def _option_lines(described: AdapterDescription) -> Iterator[str]:
    options = described.options
    assert options is not None
    shown = [f"r={options.rank}", f"lora_alpha={options.alpha:g}"]
    shown += ["use_rslora"] if options.use_rslora else []
    shown += ["fan_in_fan_out"] if options.fan_in_fan_out else []
    shown += [f"rank_pattern of {len(options.rank_pattern)}"] if options.rank_pattern else []
    shown += [f"alpha_pattern of {len(options.alpha_pattern)}"] if options.alpha_pattern else []
    yield f"options     {', '.join(shown)}"
    yield f"targets     {_targets(options.target_modules)}"
    if options.base_model:
        yield f"base model  {options.base_model} (as trained)"
    if options.peft_version:
        yield f"peft        {options.peft_version}"


def _targets(targets: Any) -> str:
    if targets is None:
        return "not given"
    return targets if isinstance(targets, str) else ", ".join(targets)


def _joined(values: Any) -> str:
    return ", ".join(f"{value:g}" for value in values) or "none"
