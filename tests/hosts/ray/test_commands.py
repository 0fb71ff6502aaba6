"""Ray's own commands with our application: what they write is what the manifest of the docs says, and it serves."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from polylens.demo import data
from polylens.server.run import listen

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray Serve: pip install 'polylens[ray]'", allow_module_level=True)
pytestmark = pytest.mark.full

ADAPTERS = next(iter(data.adapter_paths().values())).parent
SERVE = str(Path(sys.executable).parent / "serve")
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def manifest_config() -> dict[str, Any]:
    page = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text(encoding="utf-8")
    manifest = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    return yaml.safe_load(manifest["spec"]["serveConfigV2"])


def small(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, for two CPUs and the demo's model."""
    here = {"model": str(data.model_path()), "lora_dir": str(ADAPTERS), "max_replicas": None, "gpus": 0, "cpus": 0.25}
    server = {**arguments["server"], "adapters": {"loading": True, "root": str(ADAPTERS)}}
    return {
        **arguments,
        **here,
        "engine": {"device": "cpu", "dtype": "float32", "kv_bytes": 32 << 20},
        "server": server,
    }


def build(folder: Path, **environment: str) -> dict[str, Any]:
    """What `serve build` writes."""
    command = [SERVE, "build", "polylens.hosts.ray:application", "-o", "built.yaml"]
    environment = {**os.environ, **LOOPBACK, **environment}
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=120, capture_output=True)
    return yaml.safe_load((folder / "built.yaml").read_text())


def test_the_manifest_says_it_as_serve_build_does(tmp_path: Path):
    from ray.serve.schema import ServeDeploySchema

    written = manifest_config()
    (application,) = written["applications"]
    built = build(tmp_path, POLYLENS_RAY_ARGS=json.dumps(small(application["args"])))
    for config in (written, built):
        ServeDeploySchema.model_validate(config)
    assert written.keys() <= built.keys()
    assert written["http_options"] == built["http_options"]
    assert application.keys() - {"args"} <= built["applications"][0].keys()
    assert {one["name"] for one in built["applications"][0]["deployments"]} == {"Desk", "Engine", "Ingress"}


@contextmanager
def run(folder: Path, *arguments: str, url: str, **environment: str) -> Iterator[httpx.Client]:
    """`serve run`, until it is interrupted; all of it has ended afterwards."""
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [SERVE, "run", *arguments], env={**os.environ, **LOOPBACK, **environment}, stdout=log, stderr=log
        )
        try:
            with httpx.Client(base_url=url, timeout=30) as http:
                wait_until_ready(http, process, folder / "log")
                yield http
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def wait_until_ready(http: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if http.get("/ready").status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass  # not listening yet
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])


def free_port() -> int:
    with listen("127.0.0.1", 0) as listener:
        return listener.getsockname()[1]


def ask(http: httpx.Client, model: str, **more: Any) -> httpx.Response:
    asked = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    return http.post("/v1/chat/completions", json=asked, **more)


def until_two(http: httpx.Client, **more: Any) -> None:
    """Ray's command lets the first replica serve while others start."""
    deadline = time.monotonic() + 60
    while len(http.get("/stats", **more).json()["replicas"]) != 2:
        assert time.monotonic() < deadline, "there is no second replica"
        time.sleep(0.5)


def test_the_manifests_config_serves(tmp_path: Path):
    config, port = manifest_config(), free_port()
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    (application,) = config["applications"]
    application["args"] = small(application["args"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    keys = {"POLYLENS_API_KEYS": "one, two", "POLYLENS_ADMIN_API_KEYS": "three"}
    mine, admin = {"authorization": "Bearer two"}, {"authorization": "Bearer three"}
    with run(tmp_path, str(tmp_path / "config.yaml"), url=f"http://127.0.0.1:{port}", **keys) as http:
        assert ask(http, "base").status_code == 401
        assert ask(http, "base", headers=mine).status_code == 200
        for path in data.adapter_paths().values():
            assert ask(http, path.name, headers=mine).status_code == 200
        load = {"lora_name": "more", "lora_path": next(iter(data.adapter_paths().values())).name}
        assert http.post("/v1/load_lora_adapter", json=load, headers=mine).status_code in (401, 403)
        assert http.post("/v1/load_lora_adapter", json=load, headers=admin).json()["changed"]
        assert ask(http, "more", headers=mine).status_code == 200
        until_two(http, headers=admin)


def test_what_serve_build_writes_serves(tmp_path: Path):
    arguments = small(manifest_config()["applications"][0]["args"])
    environment = {"POLYLENS_RAY_ARGS": json.dumps(arguments)}
    built, port = build(tmp_path, **environment), free_port()
    built["http_options"] = {"host": "127.0.0.1", "port": port}
    (tmp_path / "built.yaml").write_text(yaml.safe_dump(built))
    with run(tmp_path, str(tmp_path / "built.yaml"), url=f"http://127.0.0.1:{port}", **environment) as http:
        assert ask(http, "base").status_code == 200
        until_two(http)


def test_serve_run_takes_the_settings_as_words(tmp_path: Path):
    words = [f"model={data.model_path()}", f"lora_dir={ADAPTERS}", "cpus=0.5"]
    with run(tmp_path, "polylens.hosts.ray:build_app", *words, url="http://127.0.0.1:8000") as http:
        cards = http.get("/v1/models").json()["data"]
        assert {path.name for path in data.adapter_paths().values()} < {card["id"] for card in cards}
