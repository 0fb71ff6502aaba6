"""Where measurements are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from polylens.disk_cache import DiskCache, default_cache_dir


def test_the_folder_named_else_the_homes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("POLYLENS_CACHE", raising=False)
    assert default_cache_dir() == tmp_path / ".cache" / "polylens"
    monkeypatch.setenv("POLYLENS_CACHE", "~/elsewhere")
    assert default_cache_dir() == tmp_path / "elsewhere"


def test_a_user_without_a_home_has_a_cache_as_long_as_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that run under any number."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("POLYLENS_CACHE", raising=False)
    cache = DiskCache("kind", 1)
    cache.store({"a": 1}, [2])
    assert DiskCache("kind", 1).load({"a": 1}, list) == [2]


def test_a_home_that_nobody_has_is_a_plain_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYLENS_CACHE", "~nobody-of-that-name/cache")
    assert default_cache_dir() == Path("~nobody-of-that-name/cache")
