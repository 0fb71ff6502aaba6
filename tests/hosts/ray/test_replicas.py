"""Two replicas behind one ingress, for real: right answers, nothing lost, whatever happens to a replica.

A Ray of its own for each test, on loopback; where Ray is not installed (`pip install polylens[ray]`) they skip.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from polylens.demo import data

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray Serve: pip install 'polylens[ray]'", allow_module_level=True)
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # whoever imports Ray first: it is to stay on loopback
pytestmark = pytest.mark.full

from benchmarks import replica_checks, replicas  # noqa: E402


def test_the_load_test_through_the_ingress_with_a_replica_killed_meanwhile(tmp_path: Path):
    (row,) = replicas.load_case(tmp_path, clients=64, requests=1024)
    assert row["ok"], row
    assert row["compared"] > 512
    assert row["ends"]["loads"] >= 3
    assert row["ends"].get("cut", 0) <= 64
    assert not set(row["killed"]) & set(row["replicas_afterwards"])


def test_requests_go_where_their_adapter_and_picture_are(tmp_path: Path):
    by_affinity, *others = replicas.affinity_case(tmp_path, clients=6, requests=300)
    assert by_affinity["ok"], by_affinity
    assert min(by_affinity["encoder_asked"]) > 0
    assert {one["routing"] for one in others} == {"balanced", "random"}
    for one in others:
        assert one["ok"], one
        assert by_affinity["picture_hits"] > one["picture_hits"]
        assert by_affinity["adapters_brought_in"] < one["adapters_brought_in"]


def test_after_a_replacement_no_replica_answers_with_the_old_content(tmp_path: Path):
    (row,) = replica_checks.replace_case(tmp_path, clients=8, requests=400)
    assert row["ok"], row
    assert row["turns"] >= 3
    assert row["told_apart"] > 100


def test_the_ingress_keeps_nothing_of_what_it_passed_on(tmp_path: Path):
    (row,) = replica_checks.memory_case(tmp_path, clients=1, requests=300)
    assert row["ok"], row


def test_a_node_of_a_cluster_is_killed_under_load_and_another_one_joins(tmp_path: Path):
    (row,) = replica_checks.cluster_case(tmp_path, clients=6, requests=300)
    assert row["ok"], row
    assert "Engine" in row["killed"]
    assert row["replaced"] == 1


def test_a_replica_killed_under_load_cuts_only_what_it_was_streaming(tmp_path: Path):
    (row,) = replicas.kill_case(tmp_path, clients=8, requests=400)
    assert row["ok"], row
    assert row["ends"].get("cut", 0) <= 8
    assert len(row["replicas_afterwards"]) == 2
    assert not set(row["killed"]) & set(row["replicas_afterwards"])


def test_deploying_anew_under_load_loses_nothing(tmp_path: Path):
    (row,) = replicas.rolling_case(tmp_path, clients=8, requests=600)
    assert row["ok"], row
    assert row["replicas_kept"] == 0


def test_replicas_are_added_while_requests_queue_and_taken_away_afterwards(tmp_path: Path):
    more, fewer = replicas.scale_case(tmp_path, clients=8, requests=100)
    assert more["ok"], more
    assert fewer["ok"], fewer
    assert (more["replicas_afterwards"], fewer["replicas_afterwards"]) == (2, 1)


def adapters_of_each(http: httpx.Client) -> list[set[str]]:
    return [{card["name"] for card in one["adapters"]} for one in http.get("/stats").json()["replicas"].values()]


def test_keys_paths_errors_and_adapters_are_as_the_servers(tmp_path: Path):
    paths = data.adapter_paths()
    wanted = replicas.settings(2, paths, paths["json"].parent)
    with replicas.deployed(wanted) as url, httpx.Client(base_url=url, timeout=60) as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/ready").status_code == 200
        assert {card["id"] for card in http.get("/v1/models").json()["data"]} == {"base", *paths}
        assert http.get("/").text.startswith("<!")
        assert http.post("/v1/chat/completions", json={"model": "nobody", "messages": []}).status_code in (400, 404)
        assert http.post("/v1/chat/completions", content=b"{").json()["error"]["type"] == "invalid_request_error"
        load = {"lora_name": "more", "lora_path": "json"}
        assert http.post("/v1/load_lora_adapter", json=load).json()["changed"]
        assert http.post("/v1/load_lora_adapter", json={**load, "lora_path": "thermal"}).status_code == 400
        assert http.post("/v1/load_lora_adapter", json={**load, "lora_path": "/etc"}).status_code == 403
        assert adapters_of_each(http) == [{"more", *paths}] * 2
        # Whoever starts later has it too, also when the book of adapters was lost between.
        replicas.kill_desk()
        assert http.post("/v1/load_lora_adapter", json={**load, "lora_name": "later"}).json()["changed"]
        killed = replicas.kill_one(url)
        assert killed not in replicas.until_replicas(url, 2)
        assert adapters_of_each(http) == [{"more", "later", *paths}] * 2
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "more"}).status_code == 200
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "more"}).status_code == 404


def test_the_command_serves_and_ends_when_told(tmp_path: Path):
    flags = f"--replicas 1 --port 8765 --kv-bytes 33554432 --object-store-bytes {replicas.OBJECT_STORE_BYTES}"
    command = [sys.executable, "-m", "polylens", "deploy", *flags.split()]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("polylens: serving polylens-demo"), (tmp_path / "log").read_text()[-2000:]
            assert httpx.get("http://127.0.0.1:8765/v1/models").status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.terminate()
            process.wait(60)


def test_rays_own_commands_can_build_it(monkeypatch: pytest.MonkeyPatch):
    from ray.serve import Application

    from polylens.hosts import ray as host

    arguments = {"model": str(data.model_path()), "replicas": 1, "max_replicas": 2}
    assert isinstance(host.build_app(arguments), Application)
    monkeypatch.setenv(host.ARGUMENTS_VARIABLE, json.dumps(arguments))
    assert isinstance(host.application, Application)
