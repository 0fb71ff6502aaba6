"""The engine's thread, driven from asyncio loops as a server does it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from polylens import LLM, ChatRequest, SamplingParams
from polylens.core import CompletionDelta
from polylens.engine.stats import collect
from polylens.engine.thread import EngineThread
from polylens.errors import (
    AbortedError,
    DeadlineError,
    EngineFailedError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    ShuttingDownError,
    UnknownAdapterError,
)
from tests.families.adapters import make_adapter
from tests.families.media import picture, user

FAMILY = "qwen2_5_vl"
QUESTION = user(picture(32, 24, 1), "what is in the picture?")
FILE = {"type": "image", "image": "/etc/passwd"}
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def adapters(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(checkpoint(FAMILY), folder / name, targets=targets, rank=4, seed=seed)
        for seed, (name, targets) in enumerate({"all": "all", "language": "language"}.items())
    }


@pytest.fixture
def llm(checkpoint: Callable[[str], Path], adapters: dict[str, Path]) -> LLM:
    return LLM(checkpoint(FAMILY), {"all": adapters["all"]}, max_running=4)


@pytest.fixture
def thread(llm: LLM) -> Iterator[EngineThread]:
    thread = EngineThread(llm.engine, max_queue=8).start()
    yield thread
    thread.stop()


def chat(adapter: str | None = None, sampling: SamplingParams = SHORT, request_id: str | None = None) -> ChatRequest:
    return ChatRequest(QUESTION, adapter, sampling, request_id)


async def settled(thread: EngineThread) -> None:
    """All requests have ended and left nothing behind."""
    await thread.check_integrity()
    assert thread.num_in_flight == 0
    stats = await thread.run(collect)
    assert (stats.running, stats.waiting, stats.kv_pages_used) == ({}, {}, 0)


def test_answers_equal_those_of_the_llm(llm: LLM):
    expected = llm.generate([chat("all"), chat(None)])

    async def main() -> None:
        handles = [thread.submit(chat("all")), thread.submit(chat(None))]
        answers = await asyncio.gather(*(handle.completion() for handle in handles))
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
        await settled(thread)

    thread = EngineThread(llm.engine).start()
    asyncio.run(main())
    thread.stop()


def test_a_handle_is_a_stream_with_times_and_counts(thread: EngineThread):
    async def main() -> None:
        async with thread.submit(chat("all", request_id="mine")) as handle:
            await handle.queued()
            deltas = [delta async for delta in handle]
            assert [delta async for delta in handle] == []
        last = deltas[-1].completion
        assert last is not None
        assert last.request_id == handle.request_id == "mine"
        assert last.text == "".join(delta.text for delta in deltas)
        assert last.usage.prompt_tokens == handle.prompt_tokens
        times = handle.times
        order = [times.submitted, times.queued, times.admitted, times.first_token, times.ended]
        assert order == sorted(order)
        await settled(thread)
        assert thread.stats.generated_tokens_total == len(last.token_ids)
        assert thread.stats.encoder_items_total == 1

    asyncio.run(main())


def test_copies_are_prepared_once_and_draw_differently(thread: EngineThread, llm: LLM, monkeypatch: pytest.MonkeyPatch):
    prepared = []
    prepare = llm.engine.prepare
    monkeypatch.setattr(llm.engine, "prepare", lambda *a, **k: prepared.append(1) or prepare(*a, **k))
    sampling = SamplingParams(max_tokens=8, ignore_eos=True, temperature=5.0, seed=3)

    async def main() -> list[tuple[int, ...]]:
        handles = thread.submit_copies(chat(None, sampling, "x"), 3)
        assert [handle.request_id for handle in handles] == ["x-0", "x-1", "x-2"]
        answers = [(await handle.completion()).token_ids for handle in handles]
        alone = await thread.submit(chat(None, SamplingParams(8, 5.0, seed=4, ignore_eos=True))).completion()
        assert alone.token_ids == answers[1]
        await settled(thread)
        return answers

    assert len(set(asyncio.run(main()))) == 3
    assert len(prepared) == 2


def test_copies_find_the_first_ones_prompt_in_the_prefix_cache(thread: EngineThread):
    question = user(picture(32, 24, 9), "what is in the picture? " * 6)

    async def main() -> None:
        handles = thread.submit_copies(ChatRequest(question, "all", SHORT), 4)
        await asyncio.gather(*(handle.queued() for handle in handles))
        answers = [await handle.completion() for handle in handles]
        assert len({answer.token_ids for answer in answers}) == 1
        assert [answer.usage.cached_tokens > 0 for answer in answers] == [False, True, True, True]
        await settled(thread)

    asyncio.run(main())


def test_copies_go_on_without_the_first(thread: EngineThread):
    async def main() -> None:
        first, second, third = thread.submit_copies(chat("all", LONG), 3)
        await third.queued()
        third.abort()
        first.abort()
        assert (await anext(second)).token_ids
        second.abort()
        await thread.run(lambda engine: None)
        await settled(thread)
        # All at once, and before they are prepared.
        for handle in thread.submit_copies(chat("all", LONG), 3):
            handle.abort()
        await thread.run(lambda engine: None)
        await settled(thread)

    asyncio.run(main())


def test_abort_frees_pages_within_a_step(thread: EngineThread, llm: LLM):
    async def main() -> None:
        handle = thread.submit(chat("all", LONG))
        await anext(handle)
        before = thread.stats.num_steps_total
        handle.abort()
        used, steps = await thread.run(lambda engine: (len(engine.scheduler.running), engine.num_steps))
        assert used == 0
        assert steps - before < 50
        with pytest.raises(AbortedError):
            await handle.completion()
        handle.abort()
        await settled(thread)

    asyncio.run(main())


def test_leaving_the_context_aborts(thread: EngineThread):
    async def main() -> None:
        async with thread.submit(chat("all", LONG)) as handle:
            await anext(handle)
        async with thread.submit(chat("all", LONG)):
            pass  # not even prepared
        await thread.run(lambda engine: None)
        await settled(thread)

    asyncio.run(main())


def test_what_is_wrong_with_a_request(thread: EngineThread):
    async def main() -> None:
        with pytest.raises(UnknownAdapterError):
            thread.submit(chat("nobody"))
        with pytest.raises(RequestError, match="messages"):
            await thread.submit(ChatRequest([])).queued()
        with pytest.raises(PromptTooLongError):
            await thread.submit(ChatRequest(user("word " * 5000))).completion()
        with pytest.raises(RequestError, match="data: URLs"):
            await thread.submit(ChatRequest([{"role": "user", "content": [FILE]}])).queued()
        running = thread.submit(chat(None, LONG, "twice"))
        with pytest.raises(RequestError, match="in use"):
            thread.submit(chat(None, LONG, "twice"))
        running.abort()
        await thread.submit(chat()).completion()
        await settled(thread)

    asyncio.run(main())


def test_the_queue_is_bounded(thread: EngineThread):
    async def main() -> None:
        handles = [thread.submit(chat(None, LONG)) for _ in range(12)]
        with pytest.raises(QueueFullError):
            thread.submit(chat())
        for handle in handles:
            handle.abort()
        await thread.run(lambda engine: None)
        await thread.submit(chat()).completion()
        await settled(thread)

    asyncio.run(main())


def test_deadlines_end_running_and_unprepared_requests(thread: EngineThread, llm: LLM, monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        with pytest.raises(DeadlineError):
            await thread.submit(chat("all", LONG), deadline_s=0.05).completion()
        release = threading.Event()
        monkeypatch.setattr(llm.engine, "prepare", lambda *a, **k: release.wait(10))
        with pytest.raises(DeadlineError):
            await thread.submit(chat("all"), deadline_s=0.05).queued()
        release.set()
        await settled(thread)

    asyncio.run(main())


def test_preparing_does_not_hold_up_running_requests(thread: EngineThread, llm: LLM, monkeypatch: pytest.MonkeyPatch):
    prepare, release = llm.engine.prepare, threading.Event()

    def slow(request: ChatRequest, **options: bool) -> object:
        if request.request_id == "slow":
            release.wait(20)
        return prepare(request, **options)

    monkeypatch.setattr(llm.engine, "prepare", slow)

    async def main() -> None:
        slow_one = thread.submit(chat("all", request_id="slow"))
        await thread.submit(chat()).completion()
        release.set()
        await slow_one.completion()

    asyncio.run(main())


def test_drain_lets_requests_end_and_refuses_new_ones(thread: EngineThread):
    async def main() -> None:
        handle = thread.submit(chat("all", SamplingParams(max_tokens=60, ignore_eos=True)))
        draining = asyncio.ensure_future(thread.drain(30))
        await asyncio.sleep(0.01)
        assert not thread.ready
        with pytest.raises(ShuttingDownError):
            thread.submit(chat())
        assert len((await handle.completion()).token_ids) == 60
        await draining
        with pytest.raises(ShuttingDownError):
            thread.call(lambda: None)

    asyncio.run(main())


def test_drain_ends_what_takes_too_long(thread: EngineThread, llm: LLM):
    async def main() -> None:
        handle = thread.submit(chat("all", LONG))
        await anext(handle)
        await thread.drain(0.01)
        with pytest.raises(ShuttingDownError):
            await handle.completion()

    asyncio.run(main())
    llm.engine.check_integrity()
    assert llm.registry.unload("all").released.done()


def test_a_crash_reaches_every_request(thread: EngineThread, llm: LLM, monkeypatch: pytest.MonkeyPatch):
    def broken() -> None:
        raise ZeroDivisionError("planted")

    async def main() -> None:
        handles = [thread.submit(chat("all", LONG)) for _ in range(3)]
        await anext(handles[0])
        monkeypatch.setattr(llm.engine, "step", broken)
        for handle in handles:
            with pytest.raises(EngineFailedError, match="ZeroDivisionError: planted"):
                await handle.completion()
        assert not thread.ready
        with pytest.raises(EngineFailedError):
            thread.submit(chat())
        with pytest.raises(EngineFailedError):
            await thread.run(lambda engine: None)
        assert thread.num_in_flight == 0
        assert llm.registry.unload("all").released.done()

    asyncio.run(main())


def test_an_error_of_a_call_is_the_callers(thread: EngineThread):
    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await thread.run(lambda engine: 1 // 0)
        await thread.submit(chat()).completion()

    asyncio.run(main())


def test_a_closed_loop_ends_its_requests(thread: EngineThread):
    async def leave() -> None:
        await anext(thread.submit(chat("all", LONG)))

    asyncio.run(leave())
    deadline = time.monotonic() + 5
    while thread.num_in_flight and time.monotonic() < deadline:
        time.sleep(0.01)
    asyncio.run(settled(thread))


def test_adapters_come_and_go_while_requests_run(thread: EngineThread, adapters: dict[str, Path]):
    async def main() -> None:
        running = thread.submit(chat("all", SamplingParams(max_tokens=40, ignore_eos=True)))
        first: CompletionDelta = await anext(running)
        assert first.completion is None
        report = await thread.load_adapter("language", adapters["language"])
        assert report.changed
        assert not (await thread.load_adapter("language", adapters["language"])).changed
        await thread.submit(chat("language")).completion()
        await thread.unload_adapter("all")
        with pytest.raises(UnknownAdapterError):
            thread.submit(chat("all"))
        assert len((await running.completion()).token_ids) == 40
        await settled(thread)

    asyncio.run(main())
