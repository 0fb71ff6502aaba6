"""The flags of `polylens deploy`; what it does is tested in tests/hosts/ray."""

from __future__ import annotations

import builtins

import pytest

from polylens.cli.deploy import deploy_parser, settings_of
from polylens.demo import data
from polylens.errors import PolylensError, RequestError
from polylens.hosts.ray.deploy import Cluster, deploy
from polylens.hosts.ray.settings import Settings


def test_it_takes_the_flags_of_serve_and_those_of_replicas():
    adapter = data.adapter_paths()["json"]
    pairs = {"--replicas": "2", "--max-replicas": "3", "--gpus-per-replica": "0.5", "--max-num-seqs": "4"}
    pairs |= {"--api-key": "k", "--lora-dir": str(adapter.parent), "--lora-modules": f"mine={adapter}"}
    flags = ["m", *(word for pair in pairs.items() for word in pair)]
    settings = settings_of(deploy_parser().parse_args(flags))
    assert (settings.model, settings.replicas, settings.max_replicas, settings.gpus) == ("m", 2, 3, 0.5)
    assert settings.engine.max_running == 4
    assert settings.server.api_keys == ("k",)
    assert settings.adapters == {"mine": str(adapter)}
    assert settings.lazy["json"] == adapter


def test_without_a_model_it_is_the_demo():
    settings = settings_of(deploy_parser().parse_args([]))
    assert settings.model == str(data.model_path())
    assert set(settings.adapters) == set(data.adapter_paths())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["m", "--replicas", "0"], "replicas must be at least 1"),
        (["m", "--replicas", "3", "--max-replicas", "2"], "below replicas"),
        (["m", "--target-requests", "0"], "--target-requests must be at least 1"),
        (["m", "--lora-dir", "/nowhere"], "--lora-dir: no such folder"),
        (["m", "--routing", "guess"], "polylens deploy --help"),
    ],
)
def test_mistakes_are_one_line(flags: list[str], says: str):
    with pytest.raises(RequestError, match=says):
        settings_of(deploy_parser().parse_args(flags))


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def no_ray(name: str, *rest: object, **more: object) -> object:
        if name.partition(".")[0] == "ray":
            raise ImportError("no ray here")
        return real(name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", no_ray)
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")  # set back afterwards
    with pytest.raises(PolylensError, match=r"pip install 'polylens\[ray\]'"):
        deploy(Settings("m"), Cluster(), "127.0.0.1", 0, lambda: None)
