"""More of what several replicas behind one ingress do: adapters replaced under load, memory, a cluster, Ray's commands.

`python -m benchmarks.replica_checks CASE …` with cases of `replace`, `memory`, `cluster`, as benchmarks/replicas.py.

replace: an adapter's content changes under load; after a change has been answered, only the new content may answer.
memory: what the ingress' process grows by, of large requests for adapters. cluster: two nodes on this machine, with a
replica on each; one node is killed while clients ask, and another one joins.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from benchmarks.load_test import Load, body, change, difference, prepare, whole
from benchmarks.replicas import (
    OBJECT_STORE_BYTES,
    Asked,
    Crowd,
    deployed,
    main,
    pictures,
    row,
    settings,
    stats,
    until_replicas,
)

from polylens.demo import data
from polylens.hosts.ray.deploy import APPLICATION
from polylens.server.run import listen

BODY_BYTES = 400_000
"""Of a request of the memory case."""


def replace_case(root: Path, clients: int, requests: int) -> list[dict[str, Any]]:
    """Two contents take turns under one name, while clients ask for it."""
    _, _, swing = prepare(data.adapter_paths(), root)
    work = Load(["swing"], pictures(2), data.PROMPT, clients, requests, root, swing)
    with deployed(settings(2, {}, root)) as url:
        return [asyncio.run(Turns(url, work).run())]


class Turns:
    """Clients of an adapter whose content changes, who know from when to when each content could have answered."""

    def __init__(self, url: str, load: Load) -> None:
        self._url, self._load = url, load
        self._times: list[tuple[float, frozenset[int]]] = []
        """From when on which contents may answer requests that begin."""
        self.wrong: list[str] = []
        self.told_apart = 0

    async def run(self) -> dict[str, Any]:
        limits = httpx.Limits(max_connections=self._load.num_clients + 8)
        async with httpx.AsyncClient(base_url=self._url, timeout=120.0, limits=limits) as http:
            right = [await self._right_answers(http, turn) for turn in range(2)]
            assert all(difference(*answers)[0] for answers in zip(*right, strict=True)), "both contents answer alike"
            self._times.append((time.monotonic(), frozenset({1})))
            left, over = iter(range(self._load.num_requests)), asyncio.Event()
            turning = asyncio.create_task(self._turn(http, over))
            await asyncio.gather(*(self._client(http, right, left, number) for number in range(self._load.num_clients)))
            over.set()
            turns = await turning
        found = {"case": "replace", "requests": self._load.num_requests, "turns": turns, "told_apart": self.told_apart}
        return {**found, "wrong": self.wrong[:10], "ok": not self.wrong}

    async def _right_answers(self, http: httpx.AsyncClient, turn: int) -> list[list[Any]]:
        await change(http, "load", lora_name="swing", lora_path=str(self._load.swing[turn]), load_inplace=True)
        return [await whole(http, body(self._load, "swing", picture)) for picture in range(len(self._load.pictures))]

    async def _turn(self, http: httpx.AsyncClient, over: asyncio.Event) -> int:
        turns = 0
        while not over.is_set():
            now = turns % 2
            self._times.append((time.monotonic(), frozenset({0, 1})))
            await change(http, "load", lora_name="swing", lora_path=str(self._load.swing[now]), load_inplace=True)
            self._times.append((time.monotonic(), frozenset({now})))
            await asyncio.sleep(1.0)
            turns += 1
        return turns

    async def _client(
        self, http: httpx.AsyncClient, right: list[list[list[Any]]], left: Iterator[int], number: int
    ) -> None:
        rng = random.Random(number)
        for _ in left:
            picture, began = rng.randrange(len(self._load.pictures)), time.monotonic()
            tokens = await whole(http, body(self._load, "swing", picture))
            allowed = self._allowed(began, time.monotonic())
            self.told_apart += len(allowed) == 1
            if all(difference(tokens, right[turn][picture])[0] for turn in allowed):
                self.wrong.append(f"picture {picture}: not the answer of content {sorted(allowed)}")

    def _allowed(self, began: float, ended: float) -> frozenset[int]:
        """Contents that a request could begin with, if it took its time from `began` to `ended`."""
        ends = [*(when for when, _ in self._times[1:]), float("inf")]
        spans = zip(self._times, ends, strict=True)
        return frozenset().union(*(which for (start, which), end in spans if start <= ended and began < end))


def memory_case(root: Path, clients: int, requests: int) -> list[dict[str, Any]]:
    """Requests of 400 KB each, of which half are for adapters that there are not."""
    adapters = data.adapter_paths()
    names = list(adapters)
    with deployed(settings(2, adapters, root)) as url, httpx.Client(base_url=url, timeout=60) as http:

        def ask(count: int) -> float:
            for number in range(count):
                there = bool(number % 2)
                name = names[number % len(names)] if there else f"nobody-{number}"
                asked = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
                answer = http.post("/v1/chat/completions", json={**asked, "user": "x" * BODY_BYTES})
                assert answer.status_code == (200 if there else 404), answer.text
            return resident_mib("ServeReplica:polylens:Ingress")

        before, after = ask(requests // 4), ask(requests)
    asked_mib = requests * BODY_BYTES / (1 << 20)
    found = {"case": "memory", "requests": requests, "asked_mib": round(asked_mib), "before_mib": round(before)}
    return [{**found, "after_mib": round(after), "ok": after - before < asked_mib / 4}]


def resident_mib(title: str) -> float:
    """Memory of the one process whose command line has `title`."""
    sizes = []
    for process in Path("/proc").iterdir():
        try:
            if title.encode() in (process / "cmdline").read_bytes():
                sizes.append(int((process / "statm").read_text().split()[1]))
        except OSError:
            continue  # no process, or gone
    (pages,) = sizes
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def cluster_case(root: Path, clients: int, requests: int) -> list[dict[str, Any]]:
    """Two nodes with room for one replica each. One of them is killed under load; later another one joins."""
    mine, guest, _ = prepare(data.adapter_paths(), root)
    few = dict(list(mine.items())[:3])
    work = Load(list(few), pictures(1), data.PROMPT, clients, requests, root, (root, root))
    with two_nodes() as nodes, deployed(settings(2, few, root, cpus=1.0), nodes.cluster.address) as url:
        crowd = Crowd(url, work, {"ignore_eos": True, "max_tokens": 32})
        before = list(stats(url)["replicas"])
        with httpx.Client(base_url=url, timeout=120) as http:
            loaded = {"lora_name": "guest", "lora_path": str(guest)}
            http.post("/v1/load_lora_adapter", json=loaded).raise_for_status()

        async def ask() -> Asked:
            return await crowd.ask(await crowd.right_answers(), lambda: asyncio.to_thread(nodes.kill))

        asked = asyncio.run(ask())
        nodes.join()
        names = until_replicas(url, 2)
        alike = [sorted(card["name"] for card in one["adapters"]) for one in stats(url)["replicas"].values()]
    found = {
        **row("cluster", asked, cut=True),
        "killed": nodes.killed,
        "replaced": len(set(names) - set(before)),
        "adapters_of_each": alike,
    }
    return [{**found, "ok": found["ok"] and alike == [sorted({*few, "guest"})] * 2}]


class Nodes:
    """A cluster of raylets on this machine's loopback, none with room for more than one replica.

    The first one takes no replicas: it has Ray's controller, and whoever asks is connected to it.
    """

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._options = {"object_store_memory": OBJECT_STORE_BYTES, "node_ip_address": "127.0.0.1"}
        self.cluster = Cluster(
            initialize_head=True, head_node_args={**self._options, "num_cpus": 0, "include_dashboard": False}
        )
        self._replicas = [self.join() for _ in range(2)]
        self.killed: list[str] = []
        """The deployments that were on the killed node."""

    def join(self) -> Any:
        return self.cluster.add_node(**self._options, num_cpus=1)

    def kill(self) -> None:
        """Kill the node of a replica, all of its processes at once; not the one that has the ingress."""
        here = {node.node_id: self._deployments_on(node) for node in self._replicas}
        node = next(node for node in self._replicas if "Ingress" not in here[node.node_id])
        self.killed = here[node.node_id]
        self.cluster.remove_node(node, allow_graceful=False)

    def _deployments_on(self, node: Any) -> list[str]:
        from ray._private.state import actors  # the public way needs the dashboard

        prefix = f"SERVE_REPLICA::{APPLICATION}#"
        there = [one["Name"] for one in actors().values() if one["Address"]["NodeID"] == node.node_id]
        return sorted(name.removeprefix(prefix).split("#")[0] for name in there if name.startswith(prefix))


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # On one machine, every node's proxy would want the same port.
    with listen("127.0.0.1", 0) as listener:
        os.environ["RAY_SERVE_WORKER_PROXY_HTTP_PORT"] = str(listener.getsockname()[1])
    nodes = Nodes()
    try:
        yield nodes
    finally:
        nodes.cluster.shutdown()
        del os.environ["RAY_SERVE_WORKER_PROXY_HTTP_PORT"]


CASES = {"replace": replace_case, "memory": memory_case, "cluster": cluster_case}


if __name__ == "__main__":
    sys.exit(main(__doc__, CASES))
