"""Names, leases and replacement, from one thread and from many."""

from __future__ import annotations

import dataclasses
import gc
import random
import threading
import weakref
from pathlib import Path

import pytest
import torch

from polylens.adapters import AdapterRegistry
from polylens.core import Adapter
from polylens.errors import (
    AdapterConflictError,
    AdapterError,
    AdapterFormatError,
    AdapterUnsupportedError,
    UnknownAdapterError,
)
from polylens.lora.arena import pack
from tests.adapters.fake_layers import LANGUAGE, TOWER, factors, fake_layers, write_adapter


@pytest.fixture
def registry() -> AdapterRegistry:
    return AdapterRegistry(fake_layers(), torch.float32, "cpu")


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Adapters with different content; the last has twice the bytes."""
    return [
        *(write_adapter(tmp_path / str(seed), factors(LANGUAGE, seed=seed)) for seed in range(3)),
        write_adapter(tmp_path / "two", {**factors(LANGUAGE), **factors(TOWER)}),
    ]


def test_load_list_unload(registry: AdapterRegistry, paths: list[Path]) -> None:
    assert registry.names() == ()
    report = registry.load("a", paths[0])
    registry.load("b", paths[1])
    assert registry.names() == ("a", "b")
    assert registry.get("a").name == "a"
    assert registry.report("a") == report
    registry.unload("a")
    assert registry.names() == ("b",)
    for call in (registry.get, registry.lease, registry.unload, registry.report):
        with pytest.raises(UnknownAdapterError, match="loaded adapters: b"):
            call("a")


def test_same_content_changes_nothing(registry: AdapterRegistry, paths: list[Path], tmp_path: Path) -> None:
    first = registry.load("a", paths[0])
    adapter = registry.get("a")
    again = registry.load("a", write_adapter(tmp_path / "copy", factors(LANGUAGE), binary=True))
    assert (first.changed, again.changed) == (True, False)
    assert registry.load("a", paths[0], replace=True).changed is False
    assert registry.get("a") is adapter


def test_other_content_needs_replace(registry: AdapterRegistry, paths: list[Path]) -> None:
    registry.load("a", paths[0])
    adapter = registry.get("a")
    with pytest.raises(AdapterConflictError, match="replace=True"):
        registry.load("a", paths[1])
    assert registry.get("a") is adapter
    assert registry.load("a", paths[1], replace=True).changed
    assert registry.get("a").digests != adapter.digests


def test_a_failed_load_changes_nothing(registry: AdapterRegistry, paths: list[Path], tmp_path: Path) -> None:
    registry.load("a", paths[0])
    adapter, size = registry.get("a"), registry.resident_bytes()
    bad = write_adapter(tmp_path / "bad", factors("nowhere"))
    for name in ("a", "b"):
        with pytest.raises(AdapterError):
            registry.load(name, bad, replace=True)
    with pytest.raises(AdapterFormatError):
        registry.load("", paths[0])
    assert registry.names() == ("a",)
    assert registry.get("a") is adapter
    assert registry.resident_bytes() == size


def test_leases_keep_an_adapter_alive(registry: AdapterRegistry, paths: list[Path]) -> None:
    registry.load("a", paths[0])
    size = registry.resident_bytes()
    one, other = registry.lease("a"), registry.lease("a")
    old = one.adapter
    registry.load("a", paths[1], replace=True)
    assert one.adapter is old
    assert registry.lease("a").adapter is registry.get("a") is not old
    assert registry.resident_bytes() == 2 * size
    one.release()
    one.release()
    assert registry.resident_bytes() == 2 * size
    other.release()
    assert registry.resident_bytes() == size
    registry.unload("a")
    assert registry.resident_bytes() == size  # the lease taken after the replacement


def test_memory_goes_with_the_last_lease(registry: AdapterRegistry, paths: list[Path]) -> None:
    registry.load("a", paths[0])
    kept = weakref.ref(registry.get("a").deltas[LANGUAGE].a)
    with registry.lease("a") as lease:
        registry.unload("a")
        gc.collect()
        assert kept() is not None
        assert lease.adapter is not None
    del lease
    gc.collect()
    assert kept() is None
    assert registry.resident_bytes() == 0


def test_lease_of_the_base_model(registry: AdapterRegistry) -> None:
    lease = registry.lease(None)
    assert lease.adapter is None
    lease.release()


def test_packed_and_without_effect(paths: list[Path]) -> None:
    registry = AdapterRegistry(fake_layers(), torch.bfloat16, "cpu", no_effect=[TOWER], pack=pack)
    report = registry.load("a", paths[3])
    assert report.no_effect == (TOWER,)
    deltas = registry.get("a").deltas.values()
    assert len({delta.a.untyped_storage().data_ptr() for delta in deltas}) == 1
    assert registry.resident_bytes() == next(iter(deltas)).a.untyped_storage().nbytes()
    assert all(delta.a.dtype == torch.bfloat16 for delta in deltas)


def test_what_is_found_out_about_the_model_later_counts(registry: AdapterRegistry, paths: list[Path]) -> None:
    layers = fake_layers()
    specs = {name: spec for name, spec in layers.specs.items() if name != TOWER}
    others = {TOWER: "a layer that is never called"}
    registry.describe_model(dataclasses.replace(layers, specs=specs, other_modules=others), no_effect=[LANGUAGE])
    assert registry.load("a", paths[0]).no_effect == (LANGUAGE,)
    with pytest.raises(AdapterUnsupportedError, match=f"{TOWER} is a layer that is never called"):
        registry.load("b", paths[3])


def test_many_threads(registry: AdapterRegistry, paths: list[Path]) -> None:
    """Random loads, replacements, unloads and leases: every lease sees one whole adapter; nothing leaks."""
    contents = {}
    for path in paths:
        registry.load("probe", path, replace=True)
        contents[registry.get("probe").digests] = registry.get("probe").num_bytes
    registry.unload("probe")
    failures: list[Exception] = []

    def use(adapter: Adapter | None) -> None:
        assert adapter is not None
        assert contents[adapter.digests] == adapter.num_bytes
        assert all(bool(delta.a.any()) for delta in adapter.deltas.values())

    def work(seed: int) -> None:
        rng = random.Random(seed)
        leases = []
        try:
            for _ in range(60):
                name = rng.choice("ab")
                try:
                    action = rng.random()
                    if action < 0.4:
                        registry.load(name, rng.choice(paths), replace=rng.random() < 0.7)
                    elif action < 0.5:
                        registry.unload(name)
                    else:
                        leases.append(registry.lease(name))
                except (UnknownAdapterError, AdapterConflictError):
                    continue
                for lease in leases:
                    use(lease.adapter)
                if len(leases) > 3:
                    leases.pop(rng.randrange(len(leases))).release()
        except Exception as error:  # noqa: BLE001 (told by the main thread)
            failures.append(error)
        finally:
            for lease in leases:
                lease.release()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert registry.resident_bytes() == sum(registry.get(name).num_bytes for name in registry.names())
    for name in registry.names():
        registry.unload(name)
    assert registry.resident_bytes() == 0
