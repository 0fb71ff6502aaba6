"""Adapters as vLLM's front process reads them: what the worker could not load fails there."""

from __future__ import annotations

import gc
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from polylens.adapters import read
from polylens.hosts.vllm import front, refused
from polylens.hosts.vllm.front import Front


class Request:
    """As vLLM's `LoRARequest`, which is not installed here."""

    def __init__(self, lora_name: str, lora_int_id: int, lora_path: str) -> None:
        self.lora_name, self.lora_int_id, self.lora_path = lora_name, lora_int_id, lora_path


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("POLYLENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(refused, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(front, "_held_request", lambda: Request)
    return tmp_path / "cache" / "vllm-adapters"


def make_front(checkpoint: Path, dtype: torch.dtype = torch.float32, layers: dict[str, str] | None = None) -> Front:
    model = SimpleNamespace(
        model=str(checkpoint), trust_remote_code=False, dtype=dtype, hf_config=SimpleNamespace(to_dict=dict),
        multimodal_config=None,
    )  # fmt: skip
    config: Any = SimpleNamespace(model_config=model)
    refused.tell_refused(config, layers or {})
    return Front(config)


def stamp(of: Front, path: Path, name: str = "a") -> Any:
    return of.stamp(Request(name, 1, str(path)))  # type: ignore[arg-type]


def test_a_request_gets_a_copy_under_the_name_of_its_content(checkpoint: Path, adapter: Path, copies: Path):
    one = make_front(checkpoint)
    held = stamp(one, adapter)
    assert held.lora_name.startswith("a@polylens-")
    assert Path(held.lora_path).parent == copies
    assert len(one.vision_digest(held)) == 64
    again = stamp(one, adapter, "b")
    assert again.lora_path == held.lora_path
    assert again.lora_int_id != held.lora_int_id


@pytest.mark.parametrize("name", ["base", " a", "a\nb", "n" * 300, "a@polylens-0", ""])
def test_a_name_that_the_worker_would_not_take_fails_its_request(
    checkpoint: Path, adapter: Path, copies: Path, name: str
):
    one = make_front(checkpoint)
    stamp(one, adapter)  # read under another name before
    with pytest.raises(ValueError, match="name"):
        stamp(one, adapter, name)


def test_values_that_the_models_type_cannot_hold_fail_their_request(checkpoint: Path, adapter: Path, copies: Path):
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[:] = 1e30
    save_file(tensors, file)
    stamp(make_front(checkpoint), adapter)
    with pytest.raises(ValueError, match="too large"):
        stamp(make_front(checkpoint, torch.float16), adapter)
    gc.collect()
    assert not list(copies.iterdir())


def test_more_tokens_than_the_model_has_fail_their_request(checkpoint: Path, adapter: Path, copies: Path):
    file, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    stored = load_file(checkpoint / "model.safetensors")
    embedding = next(tensor for name, tensor in stored.items() if name.endswith("embed_tokens.weight"))
    new = {"base_model.model.model.language_model.embed_tokens.weight": torch.cat([embedding] * 2)}
    save_file(load_file(file) | new, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"modules_to_save": ["embed_tokens"]}))
    with pytest.raises(ValueError, match="embed_tokens"):
        stamp(make_front(checkpoint), adapter)


def test_a_layer_that_the_worker_refuses_fails_its_request(checkpoint: Path, adapter: Path, copies: Path):
    layer = "model.language_model.layers.0.self_attn.q_proj"
    with pytest.raises(ValueError, match=f"{layer}: why not"):
        stamp(make_front(checkpoint, layers={layer: "why not"}), adapter)


def test_a_folder_that_is_gone_or_none_fails_its_request(checkpoint: Path, adapter: Path, copies: Path):
    one = make_front(checkpoint)
    for path in (adapter / "adapter_config.json", adapter.parent / "none", Path("~nobody-at-all/a")):
        with pytest.raises(ValueError, match="adapter"):
            stamp(one, path)


def test_copies_of_the_longest_unused_folders_are_let_go(
    checkpoint: Path, adapter: Path, copies: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(front, "MAX_KEPT", 1)
    one = make_front(checkpoint)
    first = stamp(one, adapter)
    other = Path(shutil.copytree(adapter, adapter.parent / "other"))
    file = other / "adapter_model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, file)
    second = stamp(one, other)
    assert {path.name for path in copies.iterdir()} == {Path(first.lora_path).name, Path(second.lora_path).name}
    del first
    gc.collect()
    assert {path.name for path in copies.iterdir()} == {Path(second.lora_path).name}
    assert Path(stamp(one, adapter).lora_path).exists()


def test_an_adapter_of_the_hub_is_fetched_once(
    checkpoint: Path, adapter: Path, copies: Path, monkeypatch: pytest.MonkeyPatch
):
    fetched = []
    monkeypatch.setattr(read, "_fetch", lambda hub_id: fetched.append(hub_id) or adapter)
    one = make_front(checkpoint)
    for _ in range(3):
        stamp(one, Path("somebody/adapter"))
    assert len(fetched) == 1


def test_threads_have_one_front(monkeypatch: pytest.MonkeyPatch):
    made = []

    def slowly(config: Any) -> Any:
        time.sleep(0.05)
        made.append(config)
        return object()

    monkeypatch.setattr(front, "Front", slowly)
    processor = SimpleNamespace(vllm_config=None)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(front._front_of, [processor] * 4))
    assert len(found) == len(made) == 1
