"""The simulation behind docs/scaling.md, in small."""

from __future__ import annotations

import numpy as np
from benchmarks.scaling_simulation import Kept, at_random, hashed, multiplexed, simulate, zipf


def test_affinity_hits_more_than_chance_and_spreads_better_than_a_hash():
    case = (400, 100, 4)
    by_chance, by_hash, by_load = (simulate(*case, one, 4000, 0) for one in (at_random(0), hashed, multiplexed))
    assert by_load["adapter_hits"] > by_chance["adapter_hits"] + 0.05
    assert by_load["picture_hits"] > by_chance["picture_hits"]
    assert by_load["gib_asked_of_a_replica"] < by_chance["gib_asked_of_a_replica"]
    assert by_load["busiest"] < by_hash["busiest"]


def test_what_was_used_last_is_kept():
    kept = Kept(2)
    assert [kept.use(thing) for thing in "abacb"] == [False, False, True, False, False]
    assert "a" not in kept


def test_popularity_is_zipfs():
    counts = np.bincount(zipf(np.random.default_rng(0), 10, 50_000), minlength=10)
    assert abs(counts[0] / counts[4] - 5) < 0.5
