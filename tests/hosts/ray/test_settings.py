"""What a config file says of a deployment, and what replicas say of themselves."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from polylens.demo import data
from polylens.errors import RequestError
from polylens.hosts.ray.overview import joined_metrics, joined_stats
from polylens.hosts.ray.settings import settings_of


def test_a_config_file_gives_numbers_as_numbers_or_as_text(tmp_path: Path):
    given = {
        "model": "m",
        "replicas": "2",  # `serve run APP replicas=2`
        "max_replicas": 4,
        "adapters": {"gauges": "/g"},
        "engine": {"dtype": "float32", "max_running": 8},
        "server": {"adapters": {"loading": True, "root": str(tmp_path)}},
    }
    settings = settings_of(given)
    assert (settings.replicas, settings.most_replicas) == (2, 4)
    assert settings.engine.dtype == "float32"
    assert settings.requests_per_replica == 16
    assert settings.server.model_names == ("m",)
    assert settings.server.adapters.root == tmp_path


def test_adapters_below_a_folder_are_found_once_for_all_replicas():
    folder = next(iter(data.adapter_paths().values())).parent
    settings = settings_of({"model": "m", "lora_dir": str(folder)})
    assert set(settings.lazy) == {path.name for path in data.adapter_paths().values()}


def test_keys_come_from_the_environment_unless_given(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POLYLENS_API_KEYS", "a, b")
    assert settings_of({"model": "m"}).server.api_keys == ("a", "b")
    assert settings_of({"model": "m", "server": {"api_keys": ["c"]}}).server.api_keys == ("c",)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "model"),
        ({"model": "m", "replica": 2}, "'replica' is no setting"),
        ({"model": "m", "engine": {"dtyp": "float32"}}, "'engine.dtyp' is no setting"),
        ({"model": "m", "server": {"media": {"remot": True}}}, "'server.media.remot' is no setting"),
        ({"model": "m", "replicas": "two"}, "replicas: "),
        ({"model": "m", "replicas": 0}, "at least 1"),
        ({"model": "m", "replicas": 3, "max_replicas": 2}, "below replicas"),
        ({"model": "m", "gpus": -1}, "negative"),
        ({"model": "m", "routing": "guess"}, "routing: "),
        ({"model": "m", "lora_dir": "/nowhere"}, "no such folder"),
    ],
)
def test_mistakes_are_one_line(given: dict[str, Any], says: str):
    with pytest.raises(RequestError, match=says) as found:
        settings_of(given)
    assert "\n" not in str(found.value)


def test_the_manifest_of_the_docs_says_what_polylens_takes():
    page = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text(encoding="utf-8")
    manifest = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    (application,) = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    given = {key: value for key, value in application["args"].items() if key != "lora_dir"}  # no such folder here
    assert settings_of(given).max_replicas == 8


METRICS = b"""# HELP polylens_steps_total Steps
# TYPE polylens_steps_total counter
polylens_steps_total 3.0
# HELP polylens_running Running
# TYPE polylens_running gauge
polylens_running{adapter="a b}"} 1.0
"""


def test_metrics_of_replicas_are_told_apart_by_a_label():
    from prometheus_client.parser import text_string_to_metric_families

    text = joined_metrics({"r1": METRICS, "r2": METRICS.replace(b"3.0", b"4.0")})
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}
    assert [(one.labels["replica"], one.value) for one in families["polylens_steps"]] == [("r1", 3.0), ("r2", 4.0)]
    assert families["polylens_running"][1].labels == {"replica": "r2", "adapter": "a b}"}
    assert text.count("# TYPE polylens_running") == 1


def test_stats_are_summed():
    one = {"model": "m", "running": {"": 1, "a": 2}, "vision_hits": 3, "registered": 5, "adapters": [{"name": "a"}]}
    other = {**one, "running": {"a": 1}, "vision_hits": 4}
    joined = joined_stats({"r1": json.dumps(one).encode(), "r2": json.dumps(other).encode()})
    assert joined["running"] == {"": 1, "a": 3}
    assert (joined["vision_hits"], joined["registered"], joined["model"]) == (7, 5, "m")
    assert joined["replicas"]["r2"]["vision_hits"] == 4


@pytest.mark.parametrize("text", [None, "", "model=m", "[1]"])
def test_the_application_of_the_environment_needs_an_object(text: str | None, monkeypatch: pytest.MonkeyPatch):
    host = importlib.import_module("polylens.hosts.ray")
    monkeypatch.delenv(host.ARGUMENTS_VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(host.ARGUMENTS_VARIABLE, text)
    with pytest.raises(RequestError, match=r"POLYLENS_RAY_ARGS must hold a JSON object"):
        _ = host.application
