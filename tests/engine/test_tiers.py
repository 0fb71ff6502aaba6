"""Real adapters in fewer bytes than they need: answers stay the same, names stay manageable."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polylens import LLM, ChatRequest, SamplingParams
from polylens.core import Completion
from polylens.engine.handle import RequestHandle
from polylens.engine.stats import collect
from polylens.engine.thread import EngineThread
from polylens.errors import AdapterError, AdapterFormatError, DeadlineError, UnknownAdapterError
from tests.families.adapters import make_adapter
from tests.families.media import picture, user

FAMILY = "qwen2_5_vl"
QUESTION = user(picture(32, 24, 1), "what is in the picture?")
SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
LONG = SamplingParams(max_tokens=60, ignore_eos=True)
RECIPES: dict[str, Any] = {"all": "all", "tower": "tower", "language": "language"}


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(checkpoint(FAMILY), folder / name, targets=targets, rank=4, seed=seed)
        for seed, (name, targets) in enumerate(RECIPES.items())
    }


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[[str], Path], folders: dict[str, Path]) -> tuple[dict[str | None, Any], int]:
    """Each adapter's answer, and the bytes of the largest adapter."""
    with LLM(checkpoint(FAMILY), folders) as llm:
        answers = {name: llm.chat(QUESTION, name, SHORT).token_ids for name in (None, *folders)}
        return answers, max(llm.registry.report(name).num_bytes for name in folders)


def requests(*names: str | None) -> list[ChatRequest]:
    return [ChatRequest(QUESTION, name, SHORT) for name in names]


def test_a_mixed_batch_with_room_for_one_adapter(checkpoint: Callable[[str], Path], folders, expected):
    answers, most = expected
    with LLM(checkpoint(FAMILY), adapter_device_bytes=most, adapter_host_bytes=0) as llm:
        for name, folder in folders.items():
            llm.load_adapter(name, folder)
        names = ["all", None, "language", "tower", "language", "all"]
        for completion, name in zip(llm.generate(requests(*names)), names, strict=True):
            assert isinstance(completion, Completion)
            assert completion.token_ids == answers[name]
        llm.check_integrity()
        stats = llm.registry.stats()
        assert stats.device_bytes <= most
        assert stats.num_moves_in >= 3


def test_an_adapter_larger_than_the_budget_is_refused(checkpoint: Callable[[str], Path], folders, expected):
    with LLM(checkpoint(FAMILY), adapter_device_bytes=expected[1] - 1) as llm:
        with pytest.raises(AdapterError, match="the budget for adapters is"):
            llm.load_adapter("all", folders["all"])
        assert llm.adapters == []


def test_registered_ones_are_read_when_asked_for_and_broken_ones_harm_nobody(
    checkpoint: Callable[[str], Path], folders, expected, tmp_path: Path
):
    async def main() -> None:
        for name, folder in {**folders, "broken": tmp_path}.items():
            thread.registry.register(name, folder)
        assert llm.registry.stats().num_reads == 0
        handles = [thread.submit(request) for request in requests("broken", "all", "broken", None)]
        with pytest.raises(AdapterFormatError):
            await handles[0].queued()
        assert (await handles[1].completion()).token_ids == expected[0]["all"]
        with pytest.raises(AdapterFormatError):
            await handles[2].completion()
        assert (await handles[3].completion()).token_ids == expected[0][None]
        await thread.check_integrity()

    llm = LLM(checkpoint(FAMILY), adapter_device_bytes=expected[1])
    thread = EngineThread(llm.engine).start()
    asyncio.run(main())
    thread.stop()


def test_files_that_went_away_end_their_requests_only(
    checkpoint: Callable[[str], Path], folders, expected, tmp_path: Path
):
    with LLM(checkpoint(FAMILY), adapter_device_bytes=expected[1], adapter_host_bytes=0) as llm:
        moved = folders["tower"].rename(tmp_path / "tower")
        llm.load_adapter("tower", moved)
        llm.load_adapter("all", folders["all"])
        llm.registry.prefetch("all")
        moved.rename(folders["tower"])
        lost, fine = llm.generate(requests("tower", "all"), on_error="return")
        assert isinstance(lost, AdapterError)
        assert isinstance(fine, Completion)
        assert fine.token_ids == expected[0]["all"]
        llm.check_integrity()


def test_unloading_waits_for_running_requests_and_frees_memory_and_caches(checkpoint: Callable[[str], Path], folders):
    async def main() -> None:
        running = thread.submit(ChatRequest(QUESTION, "all", LONG))
        await anext(running)
        unloading = asyncio.ensure_future(thread.unload_adapter("all"))
        await asyncio.sleep(0)
        with pytest.raises(UnknownAdapterError):
            thread.submit(ChatRequest(QUESTION, "all", SHORT))
        assert not unloading.done()
        assert len((await running.completion()).token_ids) == 60
        freed = await unloading
        stats = await thread.run(collect)
        assert (stats.adapter_bytes, stats.vision_cache_bytes, stats.kv_pages_cached) == (0, 0, 0)
        assert freed > size
        # The same again: nothing of it was left to be found.
        await thread.load_adapter("all", folders["all"])
        again = await thread.submit(ChatRequest(QUESTION, "all", SHORT)).completion()
        assert again.usage.cached_tokens == 0
        await thread.check_integrity()

    llm = LLM(checkpoint(FAMILY), {"all": folders["all"]})
    size = llm.registry.report("all").num_bytes
    thread = EngineThread(llm.engine).start()
    asyncio.run(main())
    thread.stop()


def test_caches_that_another_name_shares_stay(checkpoint: Callable[[str], Path], folders):
    async def main() -> None:
        for name in ("one", "two"):
            await thread.load_adapter(name, folders["all"])
        first = await thread.submit(ChatRequest(QUESTION, "one", SHORT)).completion()
        await thread.unload_adapter("one")
        second = await thread.submit(ChatRequest(QUESTION, "two", SHORT)).completion()
        assert second.usage.cached_tokens > 0
        assert second.token_ids == first.token_ids

    llm = LLM(checkpoint(FAMILY))
    thread = EngineThread(llm.engine).start()
    asyncio.run(main())
    thread.stop()


def test_who_gives_up_waiting_for_an_unload_does_not_undo_it(checkpoint: Callable[[str], Path], folders):
    async def main() -> None:
        running = thread.submit(ChatRequest(QUESTION, "all", LONG))
        await anext(running)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(thread.unload_adapter("all"), 0.001)
        await running.completion()
        await asyncio.sleep(0.1)
        assert (await thread.run(collect)).adapter_bytes == 0

    llm = LLM(checkpoint(FAMILY), {"all": folders["all"]})
    thread = EngineThread(llm.engine).start()
    asyncio.run(main())
    thread.stop()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)])
def test_a_random_life(checkpoint: Callable[[str], Path], folders, expected, seed: int):
    """Clients that abort, run out of time and name what is gone, loads and unloads, room for one adapter."""
    rng = random.Random(seed)

    async def client() -> None:
        for _ in range(8):
            name = rng.choice([None, *folders])
            count = rng.choice((1, 1, 3))
            deadline_s = rng.choice((None, None, 0.2))
            try:
                handles = thread.submit_copies(ChatRequest(QUESTION, name, SHORT), count, deadline_s=deadline_s)
            except UnknownAdapterError:
                await asyncio.sleep(0.05)
                continue
            await asyncio.gather(*(one(handle, name) for handle in handles))

    async def one(handle: RequestHandle, name: str | None) -> None:
        async with handle:
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() * 0.1)
                return
            with contextlib.suppress(DeadlineError):
                assert (await handle.completion()).token_ids == expected[0][name]
                answered.append(name)

    async def operator() -> None:
        for _ in range(10):
            name = rng.choice(list(folders))
            with contextlib.suppress(UnknownAdapterError):
                await thread.unload_adapter(name)
            await thread.load_adapter(name, folders[name])

    async def main() -> None:
        for name, folder in folders.items():
            thread.registry.register(name, folder)
        await asyncio.gather(operator(), *(client() for _ in range(6)))
        for name in folders:
            await thread.unload_adapter(name)
        await thread.check_integrity()
        stats = await thread.run(collect)
        assert (stats.adapter_bytes, stats.kv_pages_used, thread.num_in_flight) == (0, 0, 0)
        assert stats.adapters.num_moves_in > 3

    answered: list[str | None] = []
    llm = LLM(checkpoint(FAMILY), adapter_device_bytes=expected[1], max_running=4)
    thread = EngineThread(llm.engine).start()
    asyncio.run(main())
    thread.stop()
    assert len(answered) > 10
