"""What an engine is doing, as one value that any thread may read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from polylens.engine.adapter_lease import StoreStats

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polylens.engine.engine import Engine
    from polylens.engine.sequence import Sequence


@dataclass(frozen=True)
class EngineStats:
    """A snapshot between two steps. Counters (`num_…_total`, `…_tokens_total`) count from the engine's start.

    running, waiting: sequences by adapter name, "" for the base model. kv_pages_used: pages that running
    sequences hold; kv_pages_cached: pages only the prefix cache keeps. cached_tokens_total of
    prompt_tokens_total: prompt tokens of admitted requests, and how many of them the prefix cache had.
    """

    running: Mapping[str, int] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)
    kv_pages: int = 0
    kv_pages_used: int = 0
    kv_pages_cached: int = 0
    carried_state_bytes: int = 0
    """What the layers of running sequences remember beside their pages (hybrid models)."""
    num_preemptions_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    num_steps_total: int = 0
    vision_hits_total: int = 0
    vision_misses_total: int = 0
    encoder_rows_total: int = 0
    encoder_items_total: int = 0
    vision_cache_bytes: int = 0
    adapter_bytes: int = 0
    """Of adapters in memory, on the device and beside it."""
    adapters: StoreStats = field(default_factory=StoreStats)


def collect(engine: Engine) -> EngineStats:
    """The engine's stats; called between its steps, on its thread."""
    scheduler, vision, pages = engine.scheduler, engine.vision, engine.scheduler.pages
    return EngineStats(
        running=_by_adapter(scheduler.running),
        waiting=_by_adapter(scheduler.waiting),
        kv_pages=pages.num_pages,
        kv_pages_used=pages.num_pages - pages.num_available,
        kv_pages_cached=engine.prefix_cache.num_evictable if engine.prefix_cache is not None else 0,
        carried_state_bytes=engine.state_bytes * sum(seq.carried is not None for seq in scheduler.running),
        num_preemptions_total=scheduler.num_preemptions,
        prompt_tokens_total=scheduler.num_prompt_tokens,
        cached_tokens_total=scheduler.num_cached_tokens,
        generated_tokens_total=engine.num_generated_tokens,
        num_steps_total=engine.num_steps,
        vision_hits_total=vision.cache.hits,
        vision_misses_total=vision.cache.misses,
        encoder_rows_total=vision.num_rows,
        encoder_items_total=vision.num_items,
        vision_cache_bytes=vision.cache.num_bytes,
        adapter_bytes=engine.registry.resident_bytes(),
        adapters=engine.registry.stats(),
    )


def _by_adapter(sequences: Iterable[Sequence]) -> dict[str, int]:
    return dict(Counter("" if seq.adapter is None else seq.adapter.name for seq in sequences))
