"""`--adapter` as people write it, and as they get it wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from polylens.cli.options import check_use, parse_adapters
from polylens.errors import AdapterFormatError, UnknownAdapterError


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("gauges", "xray", "runs/lr=1e-4"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folders")
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (None, {}),
        (["g=gauges"], {"g": "gauges"}),
        (["gauges"], {"gauges": "gauges"}),
        (["./gauges/"], {"gauges": "./gauges/"}),
        (["b=xray", "a=gauges"], {"b": "xray", "a": "gauges"}),
        (["./runs/lr=1e-4"], {"lr=1e-4": "./runs/lr=1e-4"}),
        (["slow=./runs/lr=1e-4"], {"slow": "./runs/lr=1e-4"}),
        (["someone/some-lora"], {"some-lora": "someone/some-lora"}),
        (["x=someone/some-lora"], {"x": "someone/some-lora"}),
    ],
)
def test_adapters_are_named(values: list[str] | None, expected: dict[str, str]):
    assert parse_adapters(values) == expected
    assert list(parse_adapters(values)) == list(expected)


def test_the_current_folder_has_a_name(folders: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folders / "xray")
    assert parse_adapters(["."]) == {"xray": "."}


@pytest.mark.usefixtures("folders")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([""], "expected NAME=PATH"),
        (["=gauges"], "expected NAME=PATH"),
        (["g="], "expected NAME=PATH"),
        (["nowhere"], "no such folder: nowhere"),
        (["g=./a/b/c"], "no such folder: ./a/b/c"),
        (["./nowhere"], "no such folder: ./nowhere"),
        (["g=../nowhere"], "no such folder: ../nowhere"),
        (["file"], "is a file"),
        (["base=gauges"], "'base' means no adapter"),
        (["gauges", "gauges"], "the name 'gauges' is given twice"),
        (["g=gauges", "g=xray"], "the name 'g' is given twice"),
    ],
)
def test_wrong_adapters_are_refused(values: list[str], message: str):
    with pytest.raises(AdapterFormatError, match=message):
        parse_adapters(values)


def test_use_names_a_given_adapter_or_the_base():
    adapters = {"a": "somewhere"}
    assert check_use("a", adapters) == "a"
    assert check_use(None, adapters) is None
    assert check_use("base", adapters) is None
    with pytest.raises(UnknownAdapterError, match="unknown adapter 'b'; loaded adapters: a"):
        check_use("b", adapters)
