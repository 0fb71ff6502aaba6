"""A tiny checkpoint with adapters, a live server over them, and an application in this process."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI

from polylens import LLM
from polylens.engine.engine import Engine
from polylens.engine.thread import EngineThread
from polylens.server.options import ServerOptions
from tests.families.adapters import make_adapter
from tests.families.build import build_checkpoint
from tests.server.local import Local, running
from tests.server.process import ServerProcess, serving

FAMILY = "qwen2_5_vl"


@dataclass(frozen=True)
class Shop:
    """Paths of what an operator has. `spare` is an adapter not loaded at the start; below `shelf` is a copy, `lazy`."""

    folder: Path
    model: Path
    adapters: dict[str, Path]
    spare: Path

    @property
    def shelf(self) -> Path:
        return self.folder / "shelf"

    @property
    def modules(self) -> list[str]:
        return [f"{name}={path}" for name, path in self.adapters.items()]


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    folder = tmp_path_factory.mktemp("served")
    model = build_checkpoint(FAMILY, folder / "model")
    adapters = {
        name: make_adapter(model, folder / "adapters" / name, targets=targets, seed=seed)
        for seed, (name, targets) in enumerate({"eyes": "all", "words": "language"}.items(), start=1)
    }
    spare = make_adapter(model, folder / "adapters" / "spare", targets="connector", seed=9)
    shutil.copytree(spare, folder / "shelf" / "lazy")
    return Shop(folder, model, adapters, spare)


@pytest.fixture(scope="session")
def live(shop: Shop) -> Iterator[ServerProcess]:
    """A server process with two adapters; the tests share it."""
    arguments = [shop.model, "--lora-modules", *shop.modules, "--served-model-name", "tiny", "--max-num-seqs", "8"]
    with serving(
        *arguments, "--kv-bytes", str(1 << 26), "--lora-dir", shop.shelf, "--default-adapter", "video=eyes"
    ) as server:
        yield server


@pytest.fixture(scope="session")
def client(live: ServerProcess) -> OpenAI:
    return OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def reference(shop: Shop) -> Iterator[LLM]:
    """The same model and adapters, asked directly."""
    with LLM(shop.model, shop.adapters) as llm:
        yield llm


@pytest.fixture(scope="session")
def engine(shop: Shop) -> Engine:
    """An engine with the shop's adapters that runs one request at a time, for servers in this process."""
    return LLM(shop.model, shop.adapters, max_running=1, read_pickles=False).engine


@pytest.fixture(scope="session")
def engine_thread(engine: Engine) -> Iterator[EngineThread]:
    thread = EngineThread(engine, max_queue=2).start()
    yield thread
    thread.stop()


Serve = Callable[[ServerOptions], Local]


@pytest.fixture
def serve(engine: Engine, engine_thread: EngineThread) -> Iterator[Serve]:
    """`serve(options)`: a server in this process; all of them share one engine."""
    with ExitStack() as stack:
        yield lambda options: stack.enter_context(running(engine, engine_thread, options))
