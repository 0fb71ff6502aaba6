"""The adapters of a worker: which are kept, which go, and which are not taken."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polylens.adapters import load_adapter
from polylens.errors import AdapterConflictError, AdapterMismatchError
from polylens.hosts.vllm.base import read_base
from polylens.hosts.vllm.manager import AdapterManager
from polylens.hosts.vllm.names import content_id, stamped

CAPACITY = 2


def make(checkpoint: Path, refused: dict[str, str] | None = None) -> AdapterManager:
    model = SimpleNamespace(
        refused=refused or {}, absent=frozenset(), set_text_rows=lambda *_: None, num_factor_features=lambda: 10**6
    )
    named = SimpleNamespace(model=str(checkpoint), trust_remote_code=False, dtype=torch.float32)
    limits = SimpleNamespace(max_cpu_loras=CAPACITY, max_lora_rank=16)
    config: Any = SimpleNamespace(model_config=named, lora_config=limits)
    return AdapterManager(model, read_base(named), config, torch.device("cpu"))  # type: ignore[arg-type]


def request(name: str, path: Path, checkpoint: Path) -> Any:
    """As the front process stamps it."""
    layers = read_base(SimpleNamespace(model=str(checkpoint), trust_remote_code=False)).layers
    adapter, _ = load_adapter(path, layers, name=name, dtype=torch.float32, device="cpu")
    full = stamped(name, adapter.digests)
    return SimpleNamespace(lora_name=full, lora_int_id=content_id(full), lora_path=str(path))


def given(name: str, number: int, path: Path) -> Any:
    """As vLLM's server loads an adapter."""
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path))


def run(manager: AdapterManager, *requests: Any) -> None:
    numbers = tuple(one.lora_int_id for one in requests)
    mapping: Any = SimpleNamespace(index_mapping=(0, *numbers), prompt_mapping=numbers)
    manager.set_active_adapters(set(), None)
    manager.set_active_adapters(list(requests), mapping)  # type: ignore[arg-type]


def test_the_longest_unused_goes_and_a_pinned_one_stays(checkpoint: Path, adapter: Path):
    manager = make(checkpoint)
    a, b, c, d = (request(name, adapter, checkpoint) for name in "abcd")
    for one in (a, b):
        run(manager, one)
    manager.pin_adapter(a.lora_int_id)
    run(manager, c)
    assert manager.list_adapters() == {a.lora_int_id, c.lora_int_id}
    run(manager, b, c, d)
    assert manager.list_adapters() == {one.lora_int_id for one in (a, b, c, d)}  # all of a step, and the pinned one


def test_a_run_of_dummies_takes_no_adapter_with_it(checkpoint: Path, adapter: Path):
    manager = make(checkpoint)
    assert manager.add_adapter(given("a", 1, adapter))
    with manager.dummy_lora_cache():
        manager.add_dummy_lora(given("warmup_1", 1, adapter), rank=8)
    manager.remove_all_adapters()
    assert manager.list_adapters() == {1}
    assert not manager.add_adapter(given("a", 1, adapter))
    manager.remove_all_adapters()
    assert manager.list_adapters() == set()


def test_an_adapter_is_removed_by_the_number_it_was_given_with(checkpoint: Path, adapter: Path):
    manager = make(checkpoint)
    manager.add_adapter(given("a", 7, adapter))
    assert manager.remove_adapter(7)
    assert not manager.remove_adapter(7)
    with pytest.raises(ValueError, match="not loaded"):
        manager.pin_adapter(7)


def test_a_request_is_of_the_content_that_its_name_says(checkpoint: Path, adapter: Path):
    manager = make(checkpoint)
    with pytest.raises(AdapterConflictError, match="VLLM_PLUGINS"):
        run(manager, given("a", 1, adapter))
    right = request("a", adapter, checkpoint)
    other = f"{right.lora_name[:-4]}0000"
    with pytest.raises(AdapterConflictError, match="changed"):
        run(manager, given(other, content_id(other), adapter))
    run(manager, right)
    assert manager.adapter(right.lora_int_id) is not None
    assert manager.adapter(0) is None


def test_what_the_model_refuses_is_not_loaded(checkpoint: Path, adapter: Path):
    layer = "model.language_model.layers.0.self_attn.q_proj"
    with pytest.raises(AdapterMismatchError, match=layer):
        make(checkpoint, {layer: "why not"}).add_adapter(given("a", 1, adapter))
