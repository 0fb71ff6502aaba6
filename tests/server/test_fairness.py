"""A stream of requests for one adapter, in memory for one adapter, does not keep another one out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from polylens import LLM
from polylens.engine.thread import EngineThread
from polylens.server.options import ServerOptions
from tests.server.conftest import Shop
from tests.server.local import GIVE_UP_S, Local, running, until
from tests.server.media import PICTURE, QUESTION, ask, png_url
from tests.server.test_openai_client import expected

CHAT = "/v1/chat/completions"
CLIENTS = 4


@pytest.fixture
def server(shop: Shop, reference: LLM) -> Iterator[Local]:
    """Two requests run together; there is room for the larger of two adapters, and none in CPU memory beside it."""
    largest = max(reference.registry.report(name).num_bytes for name in shop.adapters)
    llm = LLM(shop.model, max_running=2, adapter_device_bytes=largest, adapter_host_bytes=0)
    for name, folder in shop.adapters.items():
        llm.registry.register(name, folder)
    thread = EngineThread(llm.engine, max_queue=2 * CLIENTS).start()
    with running(llm.engine, thread, ServerOptions(("tiny",))) as local:
        yield local
    thread.stop()


def answer(url: str, model: str) -> str:
    asked = {"model": model, "messages": ask(QUESTION, png_url(PICTURE)), "temperature": 0, "max_tokens": 8}
    response = httpx.post(url + CHAT, json=asked, timeout=GIVE_UP_S)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def test_a_stream_for_the_only_resident_adapter_keeps_no_other_out(server: Local, reference: LLM):
    over = threading.Event()

    def keep_asking() -> set[str]:
        answers = set()
        while not over.is_set():
            answers.add(answer(server.url, "eyes"))
        return answers

    with ThreadPoolExecutor(CLIENTS) as pool:
        crowd = [pool.submit(keep_asking) for _ in range(CLIENTS)]
        try:
            until(lambda: sum(server.thread.stats.running.values()) == 2)
            for _ in range(2):  # in, out, and in again
                assert answer(server.url, "words") == expected(reference, "words")
                assert not any(one.done() for one in crowd)
        finally:
            over.set()
    assert {text for one in crowd for text in one.result()} == {expected(reference, "eyes")}
    stats = server.thread.registry.stats()
    assert stats.num_moves_in >= 4
    assert stats.num_reads > stats.num_registered  # nothing stays in CPU memory, so files are read again
    server.settle()
