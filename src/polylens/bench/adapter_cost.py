"""What adapters cost beside the arithmetic: shared pictures, cold starts, many registered."""

from __future__ import annotations

import hashlib
import time
from statistics import median
from typing import TYPE_CHECKING

from polylens.bench.sides import Side, alternate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from polylens.bench.result import Result
    from polylens.bench.setting import Setting

NUM_ADAPTERS = 8


def shared_picture(setting: Setting) -> Iterator[Result]:
    """Adapters that leave the vision part alone share the base model's image features."""
    adapters = setting.adapters(NUM_ADAPTERS, "language")
    with setting.dynamic(adapters, vision_cache_bytes=1 << 28) as llm:
        side = Side(llm)
        side.until_done_s(side.prepare([setting.picture_request(name) for name in adapters]))
        runs = llm.engine.vision.num_runs
    question = f"{NUM_ADAPTERS} language-only adapters on one picture: encoder runs"
    yield setting.single(question, runs, "runs", 1)


def cold_start(setting: Setting) -> Iterator[Result]:
    """First token of an adapter never read before, minus that of a resident one, against reading its file."""
    path = setting.adapter(1)
    with setting.dynamic({}) as llm:
        llm.engine.prepare_for_adapters()
        side = Side(llm)
        extra, plain = [], []
        for turn in range(setting.rounds + 1):
            name = f"cold-{turn}"
            llm.registry.register(name, path)
            [prepared] = side.prepare([setting.request(setting.sizes.sweep_texts[0], name)])
            cold_s = side.until_done_s([prepared])
            resident_s = side.until_done_s([prepared])
            llm.unload_adapter(name)
            read_s = _read_and_hash_s(path)
            if turn:
                extra.append(cold_s - resident_s)
                plain.append(read_s)
    question = "first token of a cold adapter minus that of a resident one, vs reading its file and one sha256 of it"
    yield setting.compare(question, median(extra), median(plain), 2.0)


def _read_and_hash_s(folder: Path) -> float:
    start = time.perf_counter()
    hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()
    return time.perf_counter() - start


def many_registered(setting: Setting) -> Iterator[Result]:
    """Registered adapters that no request uses cost a step nothing."""
    sizes = setting.sizes
    adapters = setting.adapters(NUM_ADAPTERS)
    with setting.dynamic(adapters) as few, setting.dynamic(adapters) as many:
        for index in range(sizes.num_registered - NUM_ADAPTERS):
            many.registry.register(f"idle-{index}", setting.adapter(1))
        sides = []
        for llm in (many, few):
            side = Side(llm)
            requests = [
                setting.request(sizes.decode_texts[0], name, max_tokens=sizes.decode_steps + 4) for name in adapters
            ]
            prepared = side.prepare(requests)
            sides.append(lambda side=side, prepared=prepared: side.decode_step_s(prepared, sizes.decode_steps))
        a, b = alternate(sides, setting.rounds)
    question = f"decode step with {NUM_ADAPTERS} active adapters, {sizes.num_registered} vs {NUM_ADAPTERS} registered"
    yield setting.compare(question, a, b, 1.02)
