"""What several replicas behind one ingress do: under load, against one replica, by routing, and when one is killed.

`python -m benchmarks.replicas CASE …` with cases of `load`, `throughput`, `affinity`, `kill`, `rolling`, `scale`, on
the demo's model, all on this machine and its loopback. Needs `pip install polylens[ray]`. Prints one JSON line for each
measurement; exit code 1 if an answer was wrong or lost.

load: the load test of the server (benchmarks/load_test.py) through the ingress of two replicas, the busier of which is
killed meanwhile. throughput: plain requests to one process without Ray, one replica, two replicas. affinity: hit rates
where each replica has room for half of the adapters and pictures, by routing. kill: a replica is killed while clients
ask for longer answers. rolling: the application is deployed anew while clients ask. scale: clients ask until a second
replica has been added, and on until it has been taken away. More in benchmarks/replica_checks.py.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
from benchmarks.load_test import (
    MODEL,
    Load,
    Tally,
    body,
    difference,
    picture_url,
    prepare,
    run,
    served,
    tokens_of,
    whole,
)

from polylens.config import EngineConfig
from polylens.demo import data
from polylens.engine.compare import MAX_TIE_FRACTION
from polylens.hosts.ray.deploy import APPLICATION, Cluster, begin
from polylens.hosts.ray.settings import Settings
from polylens.server.options import AdapterPolicy, ServerOptions
from polylens.server.run import listen

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # before whoever imports Ray first: it is to stay on loopback

KV_BYTES = 32 << 20
OBJECT_STORE_BYTES = 80 << 20
"""Ray's least is 75 MiB."""


def settings(replicas: int, adapters: Mapping[str, Path], root: Path, cpus: float = 0.5, **engine: Any) -> Settings:
    return Settings(
        str(data.model_path()),
        replicas=replicas,
        adapters={name: str(path) for name, path in adapters.items()},
        cpus=cpus,
        engine=EngineConfig(dtype="float32", **{"kv_bytes": KV_BYTES, "vision_cache_bytes": 16 << 20, **engine}),
        server=ServerOptions((MODEL,), adapters=AdapterPolicy(loading=True, root=root), drain_s=20.0),
    )


@contextmanager
def deployed(wanted: Settings, address: str | None = None) -> Iterator[str]:
    """The application, on a Ray of its own unless `address` is one's; all of it has ended afterwards."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    listener.close()
    begin(wanted, Cluster(address, OBJECT_STORE_BYTES), "127.0.0.1", port)
    import ray  # not before: it reads then which addresses it is to use
    from ray import serve

    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def pictures(count: int) -> list[str]:
    """Addresses of `count` pictures of each domain."""
    return [picture_url(picture) for domain in data.DOMAINS for picture, _ in data.heldout(domain)[:count]]


# ---- clients that know the right answers


@dataclasses.dataclass
class Asked:
    """ends: "right", "cut" (an error event after some text), or what is wrong. slowest_s: longest wait for an end."""

    ends: Counter[str] = dataclasses.field(default_factory=Counter)
    slowest_s: float = 0.0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Crowd:
    """Clients of one server. more: fields of every request."""

    url: str
    load: Load
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    async def right_answers(self) -> dict[tuple[str, int], list[Any]]:
        async with self._client() as http:
            return {
                (name, picture): await whole(http, body(self.load, name, picture, **self.more))
                for name in (MODEL, *self.load.names)
                for picture in range(len(self.load.pictures))
            }

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=self.load.num_clients + 8)
        return httpx.AsyncClient(base_url=self.url, timeout=120.0, limits=limits)

    async def ask(
        self, right: Mapping[tuple[str, int], list[Any]], meanwhile: Callable[[], Awaitable[None]] | None = None
    ) -> Asked:
        """All requests; `meanwhile` begins when a fifth of them have been asked, and is waited for."""
        asked, left, begun = Asked(), iter(range(self.load.num_requests)), asyncio.Event()
        began = time.monotonic()
        async with self._client() as http:

            async def client(number: int) -> None:
                rng = random.Random(f"{self.load.seed}/{number}")
                names = (*self.load.names, MODEL)
                weights = [1 / rank for rank in range(1, len(names) + 1)]
                for index in left:
                    if index >= self.load.num_requests // 5:
                        begun.set()
                    key = rng.choices(names, weights)[0], rng.randrange(len(self.load.pictures))
                    start = time.monotonic()
                    asked.ends[await self._one(http, key, right[key], rng.random() < 0.5)] += 1
                    asked.slowest_s = max(asked.slowest_s, time.monotonic() - start)

            tasks = [asyncio.create_task(client(number)) for number in range(self.load.num_clients)]
            if meanwhile is not None:
                await begun.wait()
                await meanwhile()
            await asyncio.gather(*tasks)
        asked.seconds = time.monotonic() - began
        return asked

    async def _one(self, http: httpx.AsyncClient, key: tuple[str, int], right: list[Any], stream: bool) -> str:
        asked = body(self.load, *key, **self.more)
        try:
            tokens, error = await (_streamed(http, asked) if stream else _whole(http, asked))
        except httpx.HTTPError as failure:
            return f"lost: {type(failure).__name__}"
        if error is not None:
            return "cut" if tokens and error == "replica_lost" else f"lost: {error}"
        problem, _ = difference(tokens, right)
        return f"wrong: {key}: {problem}" if problem else "right"


async def _whole(http: httpx.AsyncClient, asked: dict[str, Any]) -> tuple[list[Any], str | None]:
    answer = await http.post("/v1/chat/completions", json=asked)
    if answer.status_code != httpx.codes.OK:
        return [], f"status {answer.status_code}: {answer.text[:120]}"
    return tokens_of(answer.json()["choices"][0]["logprobs"]), None


async def _streamed(http: httpx.AsyncClient, asked: dict[str, Any]) -> tuple[list[Any], str | None]:
    tokens: list[Any] = []
    async with http.stream("POST", "/v1/chat/completions", json={**asked, "stream": True}) as response:
        if response.status_code != httpx.codes.OK:
            return [], f"status {response.status_code}"
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return tokens, None
            if line:
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return tokens, event["error"]["code"]
                tokens += tokens_of(event["choices"][0]["logprobs"])
    return tokens, "the stream ended without [DONE]"


def stats(url: str) -> dict[str, Any]:
    answer = httpx.get(f"{url}/stats", timeout=30)
    answer.raise_for_status()
    return answer.json()


def counter(url: str, name: str) -> float:
    """A metric, summed over the replicas."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if re.match(rf"{name}\b[{{ ]", line))


# ---- the cases


def load_case(root: Path, clients: int, requests: int) -> list[dict[str, Any]]:
    """The server's load test through the ingress, and a replica that is killed meanwhile."""
    mine, guest, swing = prepare(data.adapter_paths(), root)
    work = Load(list(mine), pictures(1), data.PROMPT, clients, requests, guest, swing)
    killed: list[str] = []
    with deployed(settings(2, mine, root)) as url:

        async def kill() -> None:
            killed.append(await asyncio.to_thread(kill_one, url))

        tally, seconds = asyncio.run(run(url, work, kill))
        names = until_replicas(url, 2)
        time.sleep(0.5)  # stats are a moment old
        left = sum(one["in_flight"] + one["kv_pages_used"] for one in stats(url)["replicas"].values())
    return [{**load_row(tally, seconds, requests, left), "killed": killed, "replicas_afterwards": names}]


def load_row(tally: Tally, seconds: float, requests: int, left_behind: int) -> dict[str, Any]:
    ends = sum(count for end, count in tally.ends.items() if end != "loads")
    return {
        "case": "load",
        "requests": requests,
        "ends": dict(tally.ends),
        "compared": tally.compared,
        "ties": tally.ties,
        "wrong": tally.wrong[:10],
        "lost": requests - ends,
        "left_behind": left_behind,
        "requests_per_s": round(ends / seconds, 2),
        "ok": not tally.wrong
        and ends == requests
        and not left_behind
        and tally.ties <= MAX_TIE_FRACTION * tally.compared,
    }


def throughput_case(root: Path, clients: int, requests: int) -> list[dict[str, Any]]:
    """Plain requests, none repeated while it is in the caches' reach: one process, one replica, two."""
    from polylens.models.loading import load_model as load
    from polylens.server.start import start

    adapters = data.adapter_paths()
    work = Load(list(adapters), pictures(2), data.PROMPT, clients, requests, root, (root, root))
    rows = []
    config = settings(1, adapters, root).engine
    thread = start(load(data.model_path(), config), config, adapters, max_queue=256)
    with served(thread, root) as url:
        rows.append(_throughput("one process, no Ray", Crowd(url, work)))
    thread.stop()
    for replicas in (1, 2):
        with deployed(settings(replicas, adapters, root)) as url:
            rows.append(_throughput(f"{replicas} under Ray", Crowd(url, work)))
    return rows


def _throughput(what: str, crowd: Crowd) -> dict[str, Any]:
    async def main() -> Asked:
        return await crowd.ask(await crowd.right_answers())

    asked = asyncio.run(main())
    return {**row("throughput", asked), "server": what}


def affinity_case(root: Path, clients: int, requests: int) -> list[dict[str, Any]]:
    """Hit rates, where a replica has room for about half of what is asked for."""
    mine, _, swing = prepare(data.adapter_paths(), root)
    work = Load(list(mine), pictures(3), data.PROMPT, clients, requests, root, swing)
    room = {"adapter_device_bytes": 3_000_000, "adapter_host_bytes": 0, "vision_cache_bytes": 600_000}
    rows = []
    for routing in ("affinity", "balanced", "random"):
        wanted = settings(2, mine, root, prefix_cache=False, **room)
        wanted = dataclasses.replace(wanted, routing=routing, adapters_per_replica=6)  # type: ignore[arg-type]
        with deployed(wanted) as url:
            rows.append({"routing": routing, **_affinity(Crowd(url, work))})
    return rows


def _affinity(crowd: Crowd) -> dict[str, Any]:
    right = asyncio.run(crowd.right_answers())
    before = _counts(crowd.url)
    asked = asyncio.run(crowd.ask(right))
    hits, misses, moves = (now - then for now, then in zip(_counts(crowd.url), before, strict=True))
    each = [one["vision_hits"] + one["vision_misses"] for one in stats(crowd.url)["replicas"].values()]
    return {
        **row("affinity", asked),
        "picture_hits": round(hits / (hits + misses), 3),
        "adapters_brought_in": int(moves),
        "adapter_hits": round(1 - moves / crowd.load.num_requests, 3),
        "encoder_asked": each,
    }


def _counts(url: str) -> tuple[float, float, float]:
    time.sleep(0.5)  # stats are a moment old
    found = stats(url)
    return found["vision_hits"], found["vision_misses"], counter(url, "polylens_adapter_moves_in_total")


def kill_case(root: Path, clients: int, requests: int) -> list[dict[str, Any]]:
    """A replica is killed under load."""
    adapters = dict(list(data.adapter_paths().items())[:3])
    work = Load(list(adapters), pictures(1), data.PROMPT, clients, requests, root, (root, root))
    with deployed(settings(2, adapters, root)) as url:
        # Answers long enough that some are being streamed.
        crowd = Crowd(url, work, {"ignore_eos": True, "max_tokens": 32})
        killed: list[str] = []

        async def kill() -> None:
            killed.append(await asyncio.to_thread(kill_one, url))

        async def main() -> Asked:
            return await crowd.ask(await crowd.right_answers(), kill)

        asked = asyncio.run(main())
        names = until_replicas(url, 2)
    return [{**row("kill", asked, cut=True), "killed": killed, "replicas_afterwards": names}]


def kill_one(url: str) -> str:
    """Kill the process of the replica that has most to do; its name."""
    import ray

    replicas = stats(url)["replicas"]
    name = max(replicas, key=lambda one: replicas[one]["in_flight"])
    ray.kill(ray.get_actor(f"SERVE_REPLICA::{APPLICATION}#Engine#{name}", namespace="serve"))
    return name


def until_replicas(url: str, count: int, limit_s: float = 120.0) -> list[str]:
    """The names of `count` replicas that answer, once there are so many."""
    deadline = time.monotonic() + limit_s
    while len(names := list(stats(url)["replicas"])) != count and time.monotonic() < deadline:
        time.sleep(0.5)
    return names


def kill_desk() -> None:
    """Kill the process that keeps the book of adapters."""
    import ray

    actors = ray.util.list_named_actors(all_namespaces=True)
    (name,) = (one["name"] for one in actors if one["name"].startswith(f"SERVE_REPLICA::{APPLICATION}#Desk#"))
    ray.kill(ray.get_actor(name, namespace="serve"))


def scale_case(root: Path, clients: int, requests: int) -> list[dict[str, Any]]:
    """Clients ask, `requests` at a time, until there are two replicas; then one at a time, until there is one."""
    adapters = data.adapter_paths()
    work = Load(list(adapters), pictures(1), data.PROMPT, clients, requests, root, (root, root))
    wanted = dataclasses.replace(settings(1, adapters, root), max_replicas=2, target_requests=2)
    with taken_away_after(5.0), deployed(wanted) as url:
        right = asyncio.run(Crowd(url, work).right_answers())
        few = dataclasses.replace(work, num_clients=1)
        return [_until(2, Crowd(url, work), right), _until(1, Crowd(url, few), right)]


@contextmanager
def taken_away_after(delay_s: float) -> Iterator[None]:
    """Have Ray take replicas away sooner than after its ten minutes."""
    from polylens.hosts.ray import app

    number = app._number

    def sooner(settings: Settings) -> dict[str, Any]:
        wanted = number(settings)
        wanted["autoscaling_config"]["downscale_delay_s"] = delay_s
        return wanted

    with mock.patch.object(app, "_number", sooner):
        yield


def _until(replicas: int, crowd: Crowd, right: Mapping[tuple[str, int], list[Any]]) -> dict[str, Any]:
    """Ask until there are so many replicas, or two minutes are over."""
    asked, began = Asked(), time.monotonic()
    while (there := len(stats(crowd.url)["replicas"])) != replicas and time.monotonic() - began < 120:
        more = asyncio.run(crowd.ask(right))
        asked.ends += more.ends
        asked.seconds += more.seconds
        asked.slowest_s = max(asked.slowest_s, more.slowest_s)
    return {**row("scale", asked), "clients": crowd.load.num_clients, "replicas_afterwards": there}


def rolling_case(root: Path, clients: int, requests: int) -> list[dict[str, Any]]:
    """The application is deployed anew under load."""
    adapters = data.adapter_paths()
    work = Load(list(adapters), pictures(1), data.PROMPT, clients, requests, root, (root, root))
    wanted = settings(2, adapters, root)
    with deployed(wanted) as url:
        from ray import serve

        from polylens.hosts.ray.app import application

        crowd, before = Crowd(url, work), set(stats(url)["replicas"])

        async def anew() -> None:
            await asyncio.to_thread(serve.run, application(wanted), name=APPLICATION)

        async def main() -> Asked:
            return await crowd.ask(await crowd.right_answers(), anew)

        asked = asyncio.run(main())
        kept = before & set(stats(url)["replicas"])
    return [{**row("rolling", asked), "replicas_kept": len(kept)}]


def row(case: str, asked: Asked, *, cut: bool = False) -> dict[str, Any]:
    """What to print. cut: streams may have been."""
    total = sum(asked.ends.values())
    return {
        "case": case,
        "requests": total,
        "ends": dict(asked.ends),
        "requests_per_s": round(total / asked.seconds, 2),
        "slowest_s": round(asked.slowest_s, 2),
        "ok": not asked.ends.keys() - ({"right", "cut"} if cut else {"right"}),
    }


CASES = {
    "load": load_case,
    "throughput": throughput_case,
    "affinity": affinity_case,
    "kill": kill_case,
    "rolling": rolling_case,
    "scale": scale_case,
}


def main(description: str | None, cases: Mapping[str, Callable[[Path, int, int], list[dict[str, Any]]]]) -> int:
    """The command line: cases, and how much of them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="+", choices=cases)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=600)
    arguments = parser.parse_args()
    good = True
    for case in arguments.case:
        with tempfile.TemporaryDirectory() as folder:
            for found in cases[case](Path(folder), arguments.clients, arguments.requests):
                print(json.dumps(found), flush=True)
                good = good and found["ok"]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(__doc__, CASES))
