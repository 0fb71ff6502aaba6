"""Row rules of real architectures: the five families' tiny checkpoints, cut copies, results kept on disk."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from polylens.core import Component, LayerKind
from polylens.disk_cache import default_cache_dir
from polylens.models import probe_model
from polylens.models.encoder import encode
from polylens.models.loading import LoadedModel, prepare_model
from polylens.models.probe import ProbeResult, probe_row_rules
from polylens.models.probe_cache import ProbeCache
from polylens.models.probe_copy import copy_for_probe, encoder_layers, probe_layers, rule_of_block
from polylens.models.probe_items import synthetic_items
from polylens.models.probe_model import find_row_rules
from polylens.models.row_rules import ItemSize, RowRule
from tests.families.build import FAMILIES, VIDEO_FAMILIES

LoadedOf = Callable[[str], LoadedModel]


def deepened(loaded: LoadedModel, depth: int, **vision: Any) -> LoadedModel:
    """The same family with more blocks in its tower, and other vision settings."""
    config = copy.deepcopy(loaded.config)
    depth_name = "depth" if hasattr(config.vision_config, "depth") else "num_hidden_layers"
    for name, value in {depth_name: depth, **vision}.items():
        owner = config if hasattr(config, name) else config.vision_config
        setattr(owner, name, value)
    torch.manual_seed(0)
    return prepare_model(type(loaded.model)(config), loaded.processing.processor, source="deepened")


def block_rules(result: ProbeResult, loaded: LoadedModel) -> set[RowRule]:
    return {result.rules[name] for name in encoder_layers(loaded.layers)}


def test_gemma_projector_is_a_probed_parameter(loaded_of: LoadedOf) -> None:
    loaded = loaded_of("gemma3")
    bare = [name for name, spec in loaded.layers.specs.items() if spec.kind is LayerKind.MATMUL]
    assert [find_row_rules(loaded).rules[name] for name in bare] == [RowRule.TILES]


@pytest.mark.parametrize("family", FAMILIES)
def test_synthetic_items_are_unequal(family: str, loaded_of: LoadedOf) -> None:
    batches = synthetic_items(loaded_of(family).processing)
    assert len(batches) == (2 if family in VIDEO_FAMILIES else 1)
    for batch in batches:
        sizes = [ItemSize.of(item) for item in batch]
        assert len({size.num_patches for size in sizes}) > 1
        assert len({size.num_tokens for size in sizes}) > 1


@pytest.mark.parametrize(
    ("family", "wrong"), [("qwen2_5_vl", RowRule.TILES), ("llava", RowRule.IMAGES), ("gemma3", RowRule.IMAGES)]
)
def test_a_wrong_rule_is_rejected(family: str, wrong: RowRule, loaded_of: LoadedOf) -> None:
    loaded = loaded_of(family)
    probed = copy_for_probe(loaded.model, loaded.layers)
    inner = probed.model.base_model
    result = probe_row_rules(
        lambda items: encode(inner, items, dtype=torch.float32, notes=loaded.notes),
        synthetic_items(loaded.processing),
        probe_layers(probed.model, probed.layers),
        declared={r"merger\.mlp\.0|multi_modal_projector": wrong},
    )
    assert not result.mixed
    unproven = result.layers_with(RowRule.UNPROVEN)
    assert unproven
    assert {loaded.layers.specs[name].component for name in unproven} == {Component.CONNECTOR}


def test_a_copy_is_the_same_each_time_and_takes_nothing_from_the_callers_draws(loaded_of: LoadedOf) -> None:
    loaded = loaded_of("llava")  # its class embedding is drawn by its own code
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one, other = (copy_for_probe(loaded.model, loaded.layers).model.state_dict() for _ in range(2))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert torch.equal(torch.rand(1), expected)


def test_a_cut_copy_in_bfloat16_is_probed_in_float32(loaded_of: LoadedOf, tmp_path: Path) -> None:
    big = deepened(loaded_of("qwen2_vl"), 9)
    half = prepare_model(big.model.to(torch.bfloat16), big.processing.processor, source="half")
    result = find_row_rules(half, cache_dir=tmp_path, max_parameters=0)
    assert block_rules(result, half) == {RowRule.PATCHES}
    assert result.noise_floor < 1e-4


N, P, T, U = RowRule.NO_EFFECT, RowRule.PATCHES, RowRule.TILES, RowRule.UNPROVEN


@pytest.mark.parametrize(
    ("rules", "number", "expected"),
    [
        ({0: P, 8: P}, 4, P),
        ({0: P, 8: P}, 8, P),
        ({0: P, 8: T}, 4, U),
        ({0: P, 8: U}, 4, U),
        ({0: P, 8: N}, 8, N),
        ({0: P, 8: N}, 4, P),
        ({0: P, 2: N, 8: N}, 5, N),
        ({0: P, 2: N, 8: N}, 1, P),
        ({0: N, 8: N}, 4, N),
        ({}, 4, U),
    ],
)
def test_rules_of_blocks_that_were_cut(rules: dict[int, RowRule], number: int, expected: RowRule) -> None:
    assert rule_of_block(number, rules) is expected


def test_results_round_trip(tmp_path: Path) -> None:
    cache = ProbeCache(tmp_path)
    result = ProbeResult({"a": P, "b": U}, 1e-6, 2e-6, float("inf"), {"b": "because"}, ("c",))
    cache.store({"model": 1}, result)
    assert cache.load({"model": 1}, ["a", "b"]) == result
    assert cache.load({"model": 2}, ["a", "b"]) is None
    assert cache.load({"model": 1}, ["a"]) is None
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".json"]


def test_a_kept_result_is_used_and_belongs_to_one_architecture(
    loaded_of: LoadedOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = loaded_of("llava")
    first = find_row_rules(loaded, cache_dir=tmp_path)
    probes = count_probes(monkeypatch)
    assert find_row_rules(loaded, cache_dir=tmp_path) == first
    assert probes == []
    find_row_rules(deepened(loaded, 4), cache_dir=tmp_path)
    assert len(probes) == 1


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b"null", b'{"rules": {}}', b'{"rules": 3}', b"\xff\xfe", b'"tiles" -> "rows"'],
)
def test_a_damaged_file_counts_as_absent(damage: bytes, tmp_path: Path) -> None:
    cache = ProbeCache(tmp_path)
    result = ProbeResult({"a": T}, 1e-6, 2e-6, 300.0)
    cache.store({}, result)
    path = cache.path({})
    renamed = path.read_bytes().replace(b'"tiles"', b'"rows"')
    path.write_bytes(renamed if b"->" in damage else damage)
    assert cache.load({}, ["a"]) is None
    cache.store({}, result)
    assert cache.load({}, ["a"]) == result


def test_a_damaged_file_is_probed_again(loaded_of: LoadedOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loaded_of("llava")
    first = find_row_rules(loaded, cache_dir=tmp_path)
    (file,) = tmp_path.rglob("*.json")
    file.write_text(file.read_text()[:100])
    probes = count_probes(monkeypatch)
    assert find_row_rules(loaded, cache_dir=tmp_path).rules == first.rules
    assert len(probes) == 1
    assert json.loads(file.read_text())["rules"]


def test_a_folder_that_cannot_be_written_is_no_error(loaded_of: LoadedOf, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert find_row_rules(loaded_of("llava"), cache_dir=tmp_path / "file").mixed


def test_the_cache_folder_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYLENS_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("POLYLENS_CACHE")
    assert default_cache_dir() == Path.home() / ".cache" / "polylens"


def test_a_model_that_cannot_be_probed_runs_one_adapter_at_a_time(
    loaded_of: LoadedOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise TypeError("no such config entry")

    monkeypatch.setattr(probe_model, "copy_for_probe", broken)
    loaded = loaded_of("llava")
    result = find_row_rules(loaded, cache_dir=tmp_path)
    assert block_rules(result, loaded) == {RowRule.UNPROVEN}
    assert not result.mixed
    assert "no such config entry" in caplog.text
    assert not list(tmp_path.rglob("*.json"))


def count_probes(monkeypatch: pytest.MonkeyPatch) -> Sequence[None]:
    probes: list[None] = []
    real = probe_model.copy_for_probe

    def counted(*args: Any, **options: Any) -> Any:
        probes.append(None)
        return real(*args, **options)

    monkeypatch.setattr(probe_model, "copy_for_probe", counted)
    return probes
