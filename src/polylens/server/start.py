"""From options to a running engine: load the model, the adapters, start the thread."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from polylens.adapters.read import CONFIG_FILE, refuse_pickle
from polylens.core import SamplingParams
from polylens.engine.engine import Engine
from polylens.engine.thread import EngineThread
from polylens.errors import AdapterError, ModelLoadError, PolylensError, RequestError
from polylens.models.checkpoint_checks import read_json_object

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polylens.config import EngineConfig
    from polylens.models.loading import LoadedModel

GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Fields of a generation config that set sampling defaults (as in vLLM) -> their names here."""

GENERATION_FILE = "generation_config.json"

NO_DEFAULTS = ("none", "vllm")
"""What `--generation-config` may say for OpenAI's defaults; the second is vLLM's word for it."""


def start(
    loaded: LoadedModel,
    config: EngineConfig,
    adapters: Mapping[str, str | Path],
    *,
    max_queue: int,
    lazy: Mapping[str, Path] = MappingProxyType({}),
) -> EngineThread:
    """Make the engine, load the adapters, start its thread. Raises PolylensError. No pickle is read, now or later.

    lazy: adapters whose files are read when they are first asked for.
    """
    engine = Engine(loaded, dataclasses.replace(config, read_pickles=False))
    for name, path in adapters.items():
        try:
            engine.load_adapter(name, path)
        except PolylensError as error:
            raise AdapterError(f"adapter {name!r}: {error}") from error
    for name, folder in lazy.items():
        engine.registry.register(name, folder)
    return EngineThread(engine, max_queue=max_queue).start()


def adapters_below(folder: Path) -> dict[str, Path]:
    """Every adapter folder below `folder`, named by its path from there. Raises AdapterError for a pickle."""
    found = {}
    for config in sorted(folder.rglob(CONFIG_FILE)):
        adapter = config.parent
        if adapter != folder:
            refuse_pickle(adapter)
            found[adapter.relative_to(folder).as_posix()] = adapter
    return found


def stated_defaults(source: str) -> dict[str, Any] | None:
    """What `--generation-config` itself says of sampling, under the names of request fields; None: ask the model.

    source: "auto" (the model's), "none" or "vllm" (no defaults), or a folder with a generation_config.json. Raises
    ModelLoadError for one that cannot be read, or has a value out of range.
    """
    if source == "auto":
        return None
    if source in NO_DEFAULTS:
        return {}
    file = Path(os.path.expanduser(source)) / GENERATION_FILE
    return _defaults_of(read_json_object(file), str(file))


def model_defaults(loaded: LoadedModel) -> dict[str, Any]:
    """What the model's own generation config says of sampling. Raises ModelLoadError for a value out of range."""
    return _defaults_of(vars(loaded.model.generation_config), f"the generation config of {loaded.source!r}")


def _defaults_of(config: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The sampling fields of a generation config, checked as a request's would be."""
    given = {ours: config.get(theirs) for theirs, ours in GENERATION_FIELDS.items()}
    defaults = {name: value for name, value in given.items() if value is not None}
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise ModelLoadError(f"{what}: {error}") from error
    return defaults
