"""Does a server under load give every answer right, and lose nothing? How quick is it meanwhile?

`python benchmarks/load_test.py [--model DIR --adapter NAME=PATH …] [--clients 64] [--requests 1024]`; without a
model the demo's, with its adapters. Two more adapters are made of the first ones with scaled weights. Clients pick
adapters by Zipf's law; meanwhile adapters are loaded, unloaded and reloaded, clients go away in the middle of
answers, and bad requests come in. Every answer is compared with the answer to the same request alone, by the
project's definition of equal (the log-probabilities tell ties). The memory of the process is looked at all the
while: a leak of pages, leases, adapters or plain memory is a failure. Prints one JSON line; exit code 1 if anything
was wrong, lost or left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import io
import json
import random
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from PIL import Image

from polylens.config import EngineConfig
from polylens.engine.compare import LOGIT_TOLERANCE, MAX_TIE_FRACTION, TIE_GAP
from polylens.engine.thread import EngineThread
from polylens.models.loading import load_model as load
from polylens.server.app import build_app
from polylens.server.options import AdapterPolicy, ServerOptions
from polylens.server.run import listen, uvicorn_config
from polylens.server.service import Service
from polylens.server.start import start

MODEL = "base"
MAX_TOKENS = 8
ZIPF_EXPONENT = 1.0
DISCONNECT_PART = 0.05
BAD_PART = 0.05
SCALES = (0.5, 1.5)
"""Factors of the weights of the two adapters that are made."""

MEMORY_PARTS = 8
MAX_GROWTH_BYTES = 24 << 20
"""Most that the process may grow in the second half of the requests, when everything there is to cache was asked for
many times: what malloc keeps to itself. A request that left its picture and text behind would add up to more."""

Token = tuple[str, float, float]
"""A token of an answer: its text, its log-probability, and how far ahead of the second best it was."""


@dataclass
class Tally:
    """What happened to the requests."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    ties: int = 0
    compared: int = 0
    num_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    """Of the process, at the beginning, after each of MEMORY_PARTS equal parts of the requests, and at the end."""


class CutError(Exception):
    """A stream ended with an error event. begun: after some text."""

    def __init__(self, code: str, *, begun: bool) -> None:
        super().__init__(f"a stream ended with {code!r}, {'after' if begun else 'before'} its first text")
        self.code, self.begun = code, begun


@dataclass(frozen=True)
class Load:
    """How much of what. names: adapters, the most asked for first. guest: folder of one that comes and goes; swing:
    folders of two that take turns under one name."""

    names: Sequence[str]
    pictures: Sequence[str]
    prompt: str
    num_clients: int
    num_requests: int
    guest: Path
    swing: tuple[Path, Path]
    seed: int = 0


# ---- the server


@contextmanager
def served(thread: EngineThread, root: Path) -> Iterator[str]:
    """The server in a thread of this process, so that its engine can be looked into afterwards."""
    options = ServerOptions((MODEL,), adapters=AdapterPolicy(loading=True, root=root))
    app = build_app(Service(thread, options))
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn_config(app))
    runner = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    runner.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        runner.join()


def scaled(folder: Path, factor: float, into: Path) -> Path:
    """A copy of an adapter with its weights scaled."""
    shutil.copytree(folder, into)
    config = json.loads((into / "adapter_config.json").read_text())
    config["lora_alpha"] = config["lora_alpha"] * factor
    (into / "adapter_config.json").write_text(json.dumps(config))
    return into


# ---- requests


def body(load: Load, model: str, picture: int, **more: Any) -> dict[str, Any]:
    content = [
        {"type": "image_url", "image_url": {"url": load.pictures[picture]}},
        {"type": "text", "text": load.prompt},
    ]
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "logprobs": True,
        "top_logprobs": 2,
        **more,
    }


def tokens_of(logprobs: Mapping[str, Any] | None) -> list[Token]:
    tokens = []
    for item in (logprobs or {}).get("content") or ():
        top = [one["logprob"] for one in item["top_logprobs"]]
        tokens.append((item["token"], item["logprob"], top[0] - top[1]))
    return tokens


async def whole(http: httpx.AsyncClient, asked: dict[str, Any]) -> list[Token]:
    answer = await http.post("/v1/chat/completions", json=asked)
    answer.raise_for_status()
    return tokens_of(answer.json()["choices"][0]["logprobs"])


async def streamed(
    http: httpx.AsyncClient, asked: dict[str, Any], tally: Tally, leave_after: int | None
) -> list[Token]:
    """The answer's tokens; going away after some of its events if asked to."""
    began, tokens, num_events = time.monotonic(), [], 0
    async with http.stream("POST", "/v1/chat/completions", json={**asked, "stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise CutError(event["error"]["code"], begun=bool(tokens))
            new = tokens_of(event["choices"][0]["logprobs"])
            if new and not tokens:
                tally.first_token_s.append(time.monotonic() - began)
            tokens += new
            num_events += 1
            if leave_after is not None and num_events > leave_after:
                break
    return tokens


def difference(ours: Sequence[Token], alone: Sequence[Token]) -> tuple[str, bool]:
    """What is wrong with an answer ("" if nothing), and whether it went another way at a tie."""
    for index, (one, other) in enumerate(zip(ours, alone, strict=False)):
        if one[0] != other[0]:
            return ("", True) if other[2] < TIE_GAP else (f"token {index} is {one[0]!r}, alone {other[0]!r}", False)
        # A log-probability is a difference of two values that may each be off.
        if abs(one[1] - other[1]) > 2 * LOGIT_TOLERANCE:
            return f"token {index}: log-probability {one[1]:.6f}, alone {other[1]:.6f}", False
    return ("", False) if len(ours) == len(alone) else (f"{len(ours)} tokens, alone {len(alone)}", False)


BROKEN = {"url": "data:image/png;base64,AAAA"}

BAD: tuple[tuple[dict[str, Any], int], ...] = (
    ({"model": "nobody"}, 404),
    ({"temperature": -1}, 400),
    ({"surprise": True}, 400),
    ({"messages": []}, 400),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": BROKEN}]}]}, 400),
)


# ---- the run

Alone = dict[tuple[str, int], list[list[Token]]]
"""(model, picture) -> the right answers: two where two contents take turns under the name."""


async def ask_alone(http: httpx.AsyncClient, load: Load) -> Alone:
    """The answer to every request there will be, one after the other."""
    alone: Alone = {}
    for name in (MODEL, *load.names):
        for picture in range(len(load.pictures)):
            alone[name, picture] = [await whole(http, body(load, name, picture))]
    for folder in (load.guest, *load.swing):
        name = "guest" if folder == load.guest else "swing"
        await change(http, "load", lora_name=name, lora_path=str(folder))
        for picture in range(len(load.pictures)):
            alone.setdefault((name, picture), []).append(await whole(http, body(load, name, picture)))
        await change(http, "unload", lora_name=name)
    return alone


async def change(http: httpx.AsyncClient, what: str, **asked: Any) -> None:
    answer = await http.post(f"/v1/{what}_lora_adapter", json=asked)
    if answer.status_code != httpx.codes.OK:
        raise RuntimeError(f"{what} of {asked}: {answer.text}")


async def run(url: str, load: Load, meanwhile: Callable[[], Awaitable[None]] | None = None) -> tuple[Tally, float]:
    """The tally, and how long it took. `meanwhile` is done once, when a third of the requests have ended."""
    limits = httpx.Limits(max_connections=load.num_clients + 8)
    async with httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits) as http:
        alone = await ask_alone(http, load)
        await change(http, "load", lora_name="swing", lora_path=str(load.swing[0]))
        tally, left = Tally(), iter(range(load.num_requests))
        began, over = time.monotonic(), asyncio.Event()
        changes = asyncio.create_task(keep_changing(http, load, over))
        clients = [client(http, load, alone, tally, left, number) for number in range(load.num_clients)]
        await asyncio.gather(*clients, *([] if meanwhile is None else [when_a_third_has_ended(tally, load, meanwhile)]))
        seconds = time.monotonic() - began
        over.set()
        tally.ends["loads"] = await changes
        await change(http, "unload", lora_name="swing")
    return tally, seconds


async def when_a_third_has_ended(tally: Tally, load: Load, act: Callable[[], Awaitable[None]]) -> None:
    while tally.ends.total() < load.num_requests // 3:
        await asyncio.sleep(0.01)
    await act()


async def keep_changing(http: httpx.AsyncClient, load: Load, over: asyncio.Event) -> int:
    """Load and unload the guest, turn the swing, load again what is loaded, until it is over."""
    turns = 0
    while not over.is_set():
        await change(http, "load", lora_name="guest", lora_path=str(load.guest))
        await change(http, "load", lora_name="swing", lora_path=str(load.swing[(turns + 1) % 2]), load_inplace=True)
        await change(http, "load", lora_name="guest", lora_path=str(load.guest))
        await asyncio.sleep(0.05)
        await change(http, "unload", lora_name="guest")
        turns += 1
    return 3 * turns


async def client(
    http: httpx.AsyncClient, load: Load, alone: Alone, tally: Tally, left: Iterator[int], number: int
) -> None:
    """One client: request after request until all have been asked."""
    rng = random.Random(f"{load.seed}/{number}")
    names = [*load.names, "swing", MODEL, "guest"]
    weights = [1 / rank**ZIPF_EXPONENT for rank in range(1, len(names) + 1)]
    for index in left:
        if index % max(load.num_requests // MEMORY_PARTS, 1) == 0:
            tally.memory_bytes.append(resident_bytes())
        if rng.random() < BAD_PART:
            fault, status = rng.choice(BAD)
            answer = await http.post("/v1/chat/completions", json={**body(load, MODEL, 0), **fault})
            tally.ends["bad"] += 1
            if answer.status_code != status:
                tally.wrong.append(f"a bad request was answered with {answer.status_code}, not {status}")
            continue
        name, picture = rng.choices(names, weights)[0], rng.randrange(len(load.pictures))
        await one_request(http, load, alone, tally, name, picture, rng)


async def one_request(
    http: httpx.AsyncClient, load: Load, alone: Alone, tally: Tally, name: str, picture: int, rng: random.Random
) -> None:
    asked = body(load, name, picture)
    leave_after = rng.randrange(MAX_TOKENS) if rng.random() < DISCONNECT_PART else None
    try:
        if leave_after is not None or rng.random() < 0.5:
            tokens = await streamed(http, asked, tally, leave_after)
        else:
            tokens = await whole(http, asked)
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        # The guest is away half of the time.
        away = name == "guest" and status == httpx.codes.NOT_FOUND
        tally.ends["away" if away else f"status {status}"] += 1
        if not away:
            tally.wrong.append(f"{name}: status {status}")
        return
    except CutError as error:
        tally.ends["cut"] += 1
        if error.code != "replica_lost" or not error.begun:
            tally.wrong.append(f"{name}: {error}")
        return
    if leave_after is not None:
        tally.ends["left"] += 1
        return
    tally.ends["answered"] += 1
    tally.compared += 1
    tally.num_tokens += len(tokens)
    results = [difference(tokens, right) for right in alone[name, picture]]
    if all(problem for problem, _ in results):
        tally.wrong.append(f"{name}, picture {picture}: {results[0][0]}")
    elif not any(not problem and not tie for problem, tie in results):
        tally.ties += 1


def left_behind(thread: EngineThread) -> list[str]:
    """What the requests did not give back."""
    deadline = time.monotonic() + 30
    while thread.num_in_flight and time.monotonic() < deadline:
        time.sleep(0.01)
    asyncio.run(thread.check_integrity())
    stats = thread.stats
    found = {"requests": thread.num_in_flight, "running": sum(stats.running.values()), "pages": stats.kv_pages_used}
    return [f"{count} {what} left behind" for what, count in found.items() if count]


def resident_bytes() -> int:
    """Memory of this process, clients and all, without what the next collection finds to be garbage."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(thread: EngineThread, load: Load, root: Path) -> dict[str, Any]:
    """Run the load; returns the row to print."""
    adapter_bytes = thread.registry.resident_bytes()
    gc.collect()
    gc.freeze()  # what there was before need not be looked through each time
    try:
        with served(thread, root) as url:
            tally, seconds = asyncio.run(run(url, load))
            problems = [*tally.wrong, *left_behind(thread)]
        tally.memory_bytes.append(resident_bytes())
    finally:
        gc.unfreeze()
    growth = tally.memory_bytes[-1] - tally.memory_bytes[len(tally.memory_bytes) // 2]
    if growth > MAX_GROWTH_BYTES:
        problems.append(f"the process grew by {growth >> 20} MiB in the second half of the requests")
    if thread.registry.resident_bytes() != adapter_bytes:
        problems.append(f"{thread.registry.resident_bytes() - adapter_bytes} bytes of adapters left behind")
    if tally.ties > MAX_TIE_FRACTION * tally.compared:
        problems.append(f"{tally.ties} of {tally.compared} answers with ties")
    num_ends = sum(count for end, count in tally.ends.items() if end != "loads")
    if num_ends != load.num_requests:
        problems.append(f"{load.num_requests - num_ends} requests lost")
    quantiles = statistics.quantiles(tally.first_token_s, n=100) if len(tally.first_token_s) > 1 else [0.0] * 99
    return {
        "clients": load.num_clients,
        "adapters": len(load.names) + 2,
        "requests": load.num_requests,
        "ends": dict(tally.ends),
        "compared": tally.compared,
        "ties": tally.ties,
        "seconds": round(seconds, 3),
        "requests_per_s": round(num_ends / seconds, 2),
        "tokens_per_s": round(tally.num_tokens / seconds, 1),
        "first_token_p50_s": round(quantiles[49], 4),
        "first_token_p99_s": round(quantiles[98], 4),
        "memory_mib": [size >> 20 for size in tally.memory_bytes],
        "preemptions": thread.stats.num_preemptions_total,
        "problems": problems[:20],
        "ok": not problems,
    }


def picture_url(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def prepare(adapters: Mapping[str, Path], root: Path) -> tuple[dict[str, Path], Path, tuple[Path, Path]]:
    """Copies below one root: the adapters and the two scaled ones, the guest, and the two that take turns."""
    mine = {name: Path(shutil.copytree(path, root / name)) for name, path in adapters.items()}
    first, *_, last = mine.values()
    for factor in SCALES:
        mine[f"scaled-{factor}"] = scaled(first, factor, root / f"scaled-{factor}")
    guest = scaled(last, 0.75, root / "guest")
    return mine, guest, (scaled(first, 0.6, root / "swing-a"), scaled(first, 1.4, root / "swing-b"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model's folder; without it, the demo model")
    parser.add_argument("--adapter", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--pictures", type=int, default=4, help="of each domain of the demo")
    parser.add_argument("--max-queue", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    from polylens.demo import data

    adapters = dict(pair.split("=", 1) for pair in arguments.adapter) or data.adapter_paths()
    pictures = [picture for domain in data.DOMAINS for picture, _ in data.heldout(domain)[: arguments.pictures]]
    config = EngineConfig(dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        mine, guest, swing = prepare({name: Path(path) for name, path in adapters.items()}, root)
        loaded = load(arguments.model or data.model_path(), config)
        thread = start(loaded, config, mine, max_queue=arguments.max_queue)
        work = Load(
            names=list(mine),
            pictures=[picture_url(picture) for picture in pictures],
            prompt=data.PROMPT,
            num_clients=arguments.clients,
            num_requests=arguments.requests,
            guest=guest,
            swing=swing,
            seed=arguments.seed,
        )
        row = measure(thread, work, root)
        thread.stop()
    print(json.dumps(row))
    return 0 if row["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
