"""Copies of adapters that stay while somebody needs them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polylens.errors import AdapterFormatError
from polylens.hosts.vllm import copies
from polylens.hosts.vllm.copies import Copies


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "tokenizer.json"):
        (folder / name).write_text(name)
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "copies"


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_a_copy_has_what_an_adapter_is_read_from(adapter: Path, place: Path):
    copy = Copies(place).keep(Copies(place).take(adapter), "one")
    assert copy.path == place / "one"
    assert names(copy.path) == {"adapter_config.json", "adapter_model.safetensors", ".held"}


def test_a_copy_does_not_change_with_its_source(adapter: Path, place: Path):
    copy = Copies(place).keep(Copies(place).take(adapter), "one")
    (adapter / "adapter_model.safetensors").write_text("another")
    assert (copy.path / "adapter_model.safetensors").read_text() == "adapter_model.safetensors"


def test_a_copy_goes_with_its_last_holder(adapter: Path, place: Path):
    first = Copies(place).keep(Copies(place).take(adapter), "one")
    second = Copies(place).keep(Copies(place).take(adapter), "one")
    assert names(place) == {"one"}
    del first
    gc.collect()
    assert names(place) == {"one"}
    del second
    gc.collect()
    assert names(place) == set()


def test_what_an_ended_process_left_is_removed_and_what_is_held_is_not(adapter: Path, place: Path):
    held = Copies(place).keep(Copies(place).take(adapter), "held")
    code = (
        "import os, sys; from pathlib import Path; from polylens.hosts.vllm.copies import Copies;"
        "copies = Copies(Path(sys.argv[1])); copy = copies.keep(copies.take(Path(sys.argv[2])), 'left'); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code, str(place), str(adapter)], check=False)
    assert names(place) == {"held", "left"}
    Copies(place).remove_left()
    assert names(place) == {held.path.name}


def test_unfinished_copies_are_removed_when_they_are_old(adapter: Path, place: Path):
    unfinished = Copies(place).take(adapter)
    Copies(place).remove_left()
    assert names(place) == {unfinished.name}
    os.utime(unfinished, (0, 0))
    Copies(place).remove_left()
    assert names(place) == set()


def test_a_name_that_is_being_removed_is_waited_for(adapter: Path, place: Path, monkeypatch: pytest.MonkeyPatch):
    first = Copies(place).keep(Copies(place).take(adapter), "one")
    hold = copies._hold
    calls = []

    def removed_meanwhile(path: Path) -> int | None:
        calls.append(path.name)
        if path.name == "one" and calls.count("one") == 1:
            first._release()
            return None
        return hold(path)

    monkeypatch.setattr(copies, "_hold", removed_meanwhile)
    second = Copies(place).keep(Copies(place).take(adapter), "one")
    assert (second.path / "adapter_config.json").exists()


def test_a_folder_that_cannot_be_written_is_said(adapter: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AdapterFormatError, match="POLYLENS_CACHE"):
        Copies(tmp_path / "file").take(adapter)
