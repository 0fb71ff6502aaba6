"""How often is an adapter, or a picture, already where its request goes? A simulation, for docs/scaling.md.

`python benchmarks/scaling_simulation.py [--requests 60000] [--markdown]`. Requests come by a Poisson process; adapters
are asked for by Zipf's law, and so are the pictures of an adapter. Each replica keeps the adapters and the picture
features used last. Three ways to choose a replica: at random; by a hash of the adapter; and as the router of
`polylens deploy` does (its own function), which knows who has what and how many requests each has in flight. Prints
one JSON line for each case, or a table. Nothing here is measured on a model: sizes and times are the constants below.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np

from polylens.hosts.ray.affinity import Affinity, ranked, weight

ZIPF_EXPONENT = 1.0
ADAPTER_BYTES = 80 << 20
"""Rank 16 on all linear layers of a 7B model, bfloat16."""
PICTURE_BYTES = 7 << 20
"""1024 rows of 3584 features, bfloat16."""
ADAPTERS_KEPT = 128
PICTURES_KEPT = 512
PICTURES_OF_ADAPTER = 20
ANSWER_S = 2.0
LOAD_S = 0.4
"""An adapter that must be read, from a local disk or the page cache."""
ENCODE_S = 0.15

CASES = ((100, 10, 2), (1_000, 100, 4), (1_000, 1_000, 16), (10_000, 100, 4), (10_000, 1_000, 16), (10_000, 1_000, 64))
"""Adapters, requests a second, replicas."""


class Kept:
    """The things used last, up to a number."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._things: OrderedDict[Hashable, None] = OrderedDict()

    def __contains__(self, thing: Hashable) -> bool:
        return thing in self._things

    def use(self, thing: Hashable) -> bool:
        """Whether it was there; it is now."""
        there = thing in self._things
        self._things[thing] = None
        self._things.move_to_end(thing)
        if len(self._things) > self._limit:
            self._things.popitem(last=False)
        return there


@dataclass
class Replica:
    adapters: Kept = field(default_factory=lambda: Kept(ADAPTERS_KEPT))
    pictures: Kept = field(default_factory=lambda: Kept(PICTURES_KEPT))
    in_flight: int = 0
    seen: set[int] = field(default_factory=set)
    """Adapters asked of it in the part that counts: what it would have to hold to read none twice."""


Choose = Callable[[int, int, list[Replica]], int]


def at_random(seed: int) -> Choose:
    rng = np.random.default_rng(seed)
    return lambda _adapter, _picture, replicas: int(rng.integers(len(replicas)))


def hashed(adapter: int, _picture: int, replicas: list[Replica]) -> int:
    return min(range(len(replicas)), key=lambda replica: weight(str(adapter), str(replica)))


def multiplexed(adapter: int, picture: int, replicas: list[Replica]) -> int:
    lengths = {index: replica.in_flight for index, replica in enumerate(replicas)}
    holders = {index for index, replica in enumerate(replicas) if adapter in replica.adapters}
    return ranked(Affinity(str(adapter), str(picture)), lengths, holders)[0]


def zipf(rng: np.random.Generator, count: int, size: int) -> np.ndarray:
    """`size` draws of 0 … count - 1, the first most often."""
    weights = 1.0 / np.arange(1, count + 1) ** ZIPF_EXPONENT
    return rng.choice(count, size, p=weights / weights.sum())


def simulate(num_adapters: int, rate: int, num_replicas: int, choose: Choose, num_requests: int, seed: int) -> dict:
    """Hit rates and loads over the second half of the requests, when the caches have filled.

    busiest: requests in flight at the replica with most of them, in parts of the mean, on average.
    """
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1.0 / rate, num_requests))
    adapters, pictures = zipf(rng, num_adapters, num_requests), zipf(rng, PICTURES_OF_ADAPTER, num_requests)
    replicas = [Replica() for _ in range(num_replicas)]
    ends: list[tuple[float, int]] = []
    adapter_hits = picture_hits = 0
    busiest: list[float] = []
    first = num_requests // 2
    for index, (now, adapter, picture) in enumerate(zip(times, adapters.tolist(), pictures.tolist(), strict=True)):
        while ends and ends[0][0] <= now:
            replicas[heapq.heappop(ends)[1]].in_flight -= 1
        chosen = choose(adapter, picture, replicas)
        replica = replicas[chosen]
        had, encoded = replica.adapters.use(adapter), replica.pictures.use((adapter, picture))
        replica.in_flight += 1
        heapq.heappush(ends, (now + ANSWER_S + LOAD_S * (not had) + ENCODE_S * (not encoded), chosen))
        if index >= first:
            adapter_hits, picture_hits = adapter_hits + had, picture_hits + encoded
            replica.seen.add(adapter)
            if index % 100 == 0:
                busiest.append(max(one.in_flight for one in replicas) * num_replicas / len(ends))
    counted = num_requests - first
    misses = counted - adapter_hits
    return {
        "adapter_hits": round(adapter_hits / counted, 3),
        "picture_hits": round(picture_hits / counted, 3),
        "loads_per_s_and_replica": round(misses / (times[-1] - times[first]) / num_replicas, 2),
        "gib_asked_of_a_replica": round(max(len(one.seen) for one in replicas) * ADAPTER_BYTES / (1 << 30), 1),
        "busiest": round(float(np.mean(busiest)), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60_000, help="of each case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", action="store_true", help="the table of docs/scaling.md")
    arguments = parser.parse_args()
    if arguments.markdown:
        print(
            "| adapters | requests/s | replicas | routing | adapter there | picture there | loads/s of a replica "
            "| GiB asked of it | busiest |\n|" + "---|" * 9
        )
    for case in CASES:
        for name, choose in (("random", at_random(arguments.seed)), ("hashed", hashed), ("multiplexed", multiplexed)):
            found = simulate(*case, choose, arguments.requests, arguments.seed)
            if arguments.markdown:
                cells = [*(f"{number:,}" for number in case), name, *map(str, found.values())]
                print(f"| {' | '.join(cells)} |", flush=True)
            else:
                keys = ("adapters", "requests_per_s", "replicas")
                print(json.dumps({**dict(zip(keys, case, strict=True)), "routing": name, **found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
