"""The command line itself: help, version, and mistakes that are seen before any model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

import polylens as package
from tests.cli.process import assert_refused, polylens, polylens_process

COMMANDS = ("run", "batch", "inspect", "verify", "demo")


def test_help_lists_every_command():
    done = polylens_process("--help")
    assert done.returncode == 0
    assert done.stderr == ""
    for command in COMMANDS:
        assert f"\n  {command} " in done.stdout
    assert polylens().stdout.splitlines()[2:] == done.stdout.splitlines()[2:]  # below the program's name


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str):
    done = polylens(command, "-h")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: ")
    assert f" {command} [OPTIONS]" in done.stdout.splitlines()[0]


def test_version():
    assert polylens("--version").stdout == f"polylens {package.__version__}\n"


def test_a_mistake_gets_one_line_from_a_process(tmp_path: Path):
    """Nothing else that libraries write stands beside it, after they are imported and a model was looked for."""
    assert_refused(polylens_process("run", "no-such-model", "--prompt", "x", cwd=tmp_path), "cannot load model")


@pytest.mark.full  # the hub's client tries again for half a minute
@pytest.mark.parametrize("arguments", [("run", "org/model", "--prompt", "x"), ("inspect", "org/adapter")])
def test_without_a_network_a_hub_id_gets_one_line(tmp_path: Path, arguments: list[str]):
    nowhere = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    assert_refused(polylens_process(*arguments, cwd=tmp_path, **nowhere), arguments[1])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fly"], ["fly"]),
        (["run"], ["MODEL"]),
        (["run", "m"], ["--prompt"]),
        (["run", "m", "--prompt", "x", "--speed", "9"], ["--speed"]),
        (["run", "m", "--prompt", "x", "--max-tokens", "many"], ["--max-tokens"]),
        (["run", "m", "--prompt", "x", "--max-tokens", "0"], ["max_tokens", "greater than or equal to 1"]),
        (["run", "m", "--prompt", "x", "--temperature", "nan"], ["temperature"]),
        (["run", "m", "--prompt", "x", "--dtype", "int8"], ["--dtype"]),
        (["run", "m", "--prompt", "x", "--use", "gauges"], ["unknown adapter 'gauges'"]),
        (["run", "m", "--prompt", "x", "--adapter", "nowhere"], ["no such folder: nowhere"]),
        (["run", "./nowhere", "--prompt", "x"], ["model folder './nowhere' does not exist"]),
        (["run", "m", "--prompt", "x", "--device", "warp"], ["device 'warp' cannot be used"]),
        (["run", "m", "--prompt", "x", "--device", "meta"], ["device 'meta' cannot be used"]),
        (["run", "no-such-model", "--prompt", "x"], ["cannot load model 'no-such-model'"]),
        (["run", "~nobody-of-this-name/m", "--prompt", "x"], ["does not exist"]),
        (["verify", "m"], ["--adapter"]),
        (["inspect", "./nowhere"], ["./nowhere"]),
        (["demo", "--limit", "0"], ["--limit"]),
        (["demo", "--sheet", "no/such/folder/x.png"], ["--sheet"]),
        (["batch", "m", "--input", "in.jsonl"], ["--output"]),
        (["batch", "m", "--input", "none.jsonl", "--output", "out.jsonl"], ["none.jsonl", "No such file"]),
        (["batch", "m", "--input", "in.jsonl", "--output", "in.jsonl"], ["is the input file"]),
        (["batch", "m", "--input", "in.jsonl", "--output", "no/out.jsonl"], ["does not exist"]),
        (["batch", "m", "--input", "in.jsonl", "--output", "."], ["is a folder"]),
    ],
)
def test_mistakes_get_one_line(tmp_path: Path, arguments: list[str], words: list[str]):
    (tmp_path / "in.jsonl").write_text("{}\n")
    assert_refused(polylens(*arguments, cwd=tmp_path), *words)
    assert not (tmp_path / "out.jsonl").exists()
