"""From options to a running engine: load the model, the adapters, start the thread."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from polylens.adapters.read import CONFIG_FILE, find_adapter
from polylens.engine.engine import Engine
from polylens.engine.thread import EngineThread
from polylens.errors import AdapterError, PolylensError
from polylens.models.loading import LoadedModel, load_model
from polylens.models.processing import Processing
from polylens.server.adapter_paths import refuse_pickle

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from polylens.config import EngineConfig

GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Fields of a generation config that set sampling defaults (as in vLLM) -> their names here."""


def load(model: str | Path, config: EngineConfig, chat_template: str | None = None) -> LoadedModel:
    """Load the model. chat_template: the text of a template in place of the model's own."""
    loaded = load_model(model, config)
    if chat_template is None:
        return loaded
    processor = loaded.processing.processor
    processor.chat_template = chat_template
    processing = Processing(processor, loaded.config, loaded.model.generation_config, whole=loaded.processing.whole)
    return dataclasses.replace(loaded, processing=processing)


def start(
    loaded: LoadedModel,
    config: EngineConfig,
    adapters: Mapping[str, str | Path],
    *,
    max_queue: int,
    lazy: Mapping[str, Path] = MappingProxyType({}),
) -> tuple[Engine, EngineThread]:
    """Make the engine, load the adapters (none of which may be a pickle), start its thread. Raises PolylensError.

    lazy: adapters whose files are read when they are first asked for.
    """
    engine = Engine(loaded, config)
    engine.loaded = dataclasses.replace(loaded, max_model_len=context_that_fits(engine))
    for name, path in adapters.items():
        try:
            refuse_pickle(find_adapter(path))
            engine.load_adapter(name, path)
        except PolylensError as error:
            raise AdapterError(f"adapter {name!r}: {error}") from error
    for name, folder in lazy.items():
        engine.registry.register(name, folder)
    return engine, EngineThread(engine, max_queue=max_queue).start()


def adapters_below(folder: Path) -> dict[str, Path]:
    """Every adapter folder below `folder`, named by its path from there. Raises AdapterError for a pickle."""
    found = {}
    for config in sorted(folder.rglob(CONFIG_FILE)):
        adapter = config.parent
        if adapter != folder:
            refuse_pickle(adapter)
            found[adapter.relative_to(folder).as_posix()] = adapter
    return found


def context_that_fits(engine: Engine) -> int:
    """Most tokens of prompt plus answer: the model's context, or what all KV pages together hold if that is less.

    So an answer without `max_tokens` ends where the pages do; it is not refused for what it might have needed.
    """
    # The last token is never computed and needs no place.
    return min(engine.loaded.max_model_len, engine.scheduler.allocator.num_pages * engine.config.page_tokens + 1)


def sampling_defaults(loaded: LoadedModel) -> dict[str, Any]:
    """What the model's own generation config says about sampling, under the names of request fields."""
    config = loaded.model.generation_config
    given = {ours: getattr(config, theirs, None) for theirs, ours in GENERATION_FIELDS.items()}
    return {name: value for name, value in given.items() if value is not None}
