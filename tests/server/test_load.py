"""The load test of benchmarks/, in short: many clients, changing adapters, clients that leave, bad requests."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.load_test import Load, measure, picture_url, prepare

from polylens.config import EngineConfig
from polylens.models.loading import load_model as load
from polylens.server.start import start
from tests.families.media import picture
from tests.server.conftest import Shop
from tests.server.media import QUESTION


@pytest.mark.parametrize(
    ("num_clients", "num_requests"), [(8, 96), pytest.param(64, 2000, marks=pytest.mark.full)], ids=["short", "long"]
)
def test_every_answer_is_right_and_nothing_is_lost(shop: Shop, tmp_path: Path, num_clients: int, num_requests: int):
    # So few pages that running requests are preempted.
    config = EngineConfig(dtype="float32", max_running=8, kv_bytes=1 << 20)
    adapters, guest, swing = prepare({**shop.adapters, "spare": shop.spare}, tmp_path)
    thread = start(load(shop.model, config), config, adapters, max_queue=256)
    work = Load(
        names=list(adapters),
        pictures=[picture_url(picture(40 + 8 * seed, 48, seed)) for seed in range(3)],
        prompt=QUESTION,
        num_clients=num_clients,
        num_requests=num_requests,
        guest=guest,
        swing=swing,
    )
    try:
        row = measure(thread, work, tmp_path)
    finally:
        thread.stop()
    assert row["ok"], row
    assert row["compared"] > num_requests / 2
    assert row["ends"]["loads"] >= 3
