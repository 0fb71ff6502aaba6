"""Adapter files come from strangers: whatever is wrong is one clear error, and nothing in them is executed."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from polylens.adapters.read import MAX_CONFIG_BYTES, MAX_TENSOR_NAME_CHARS, read_adapter
from polylens.errors import AdapterFormatError, AdapterUnsupportedError
from tests.adapters.fake_layers import LANGUAGE, config, factors, write_adapter

WEIGHTS = "adapter_model.safetensors"
BIN = "adapter_model.bin"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", factors(LANGUAGE))


@pytest.fixture
def binary(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "binary", factors(LANGUAGE), binary=True)


def refused(folder: Path | str, words: str) -> None:
    with pytest.raises(AdapterFormatError, match=words) as caught:
        read_adapter(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def test_reads_both_formats_alike(adapter: Path, binary: Path) -> None:
    one, other = read_adapter(adapter), read_adapter(str(binary))
    assert one.options == other.options
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


def test_tensors_outlive_the_file(adapter: Path) -> None:
    files = read_adapter(adapter)
    before = {name: tensor.clone() for name, tensor in files.tensors.items()}
    (adapter / WEIGHTS).write_bytes(b"\0" * (adapter / WEIGHTS).stat().st_size)
    assert all(torch.equal(files.tensors[name], before[name]) for name in before)


@pytest.mark.parametrize(
    "path", ["/no/such/folder", "./missing", "just-a-name", "a/b/c", "", "x" * 5000, "a\0b", "~nobody-here/x"]
)
def test_no_such_adapter(path: str) -> None:
    refused(path, "neither a folder nor a hub id|cannot be opened")


def test_hub_id_that_cannot_be_fetched() -> None:
    refused("some-org/some-adapter", "'some-org/some-adapter' is no folder here and cannot be fetched")


def test_hub_id_is_fetched(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def fetch(hub_id: str, allow_patterns: list[str]) -> str:
        asked.append((hub_id, allow_patterns))
        return str(adapter)

    monkeypatch.setattr("polylens.adapters.read.snapshot_download", fetch)
    files = read_adapter("some-org/some-adapter")
    assert files.source == "some-org/some-adapter"
    assert asked[0][0] == "some-org/some-adapter"
    assert {"adapter_config.json", WEIGHTS, BIN, "non_lora_trainables.bin"} <= set(asked[0][1])


def test_a_file_is_not_a_folder(adapter: Path) -> None:
    refused(adapter / WEIGHTS, "is a file; give the folder")


def test_empty_folder(tmp_path: Path) -> None:
    refused(tmp_path, "has no adapter_config.json")


def test_the_only_adapter_of_a_folder_is_taken(adapter: Path) -> None:
    """`checkpoint-500/`, or the sub-folder PEFT writes for an adapter not called "default"."""
    assert read_adapter(adapter.parent).tensors.keys() == read_adapter(adapter).tensors.keys()


def test_of_several_sub_folders_one_must_be_chosen(adapter: Path) -> None:
    write_adapter(adapter.parent / "checkpoint-500", factors(LANGUAGE))
    refused(adapter.parent, "its sub-folders 'adapter', 'checkpoint-500' have one")


def sharded(folder: Path, shard_of: dict[str, str]) -> Path:
    """An adapter whose index says `shard_of`; every tensor is written to the file named there, if it can be."""
    tensors = factors(LANGUAGE)
    write_adapter(folder, tensors)
    (folder / WEIGHTS).unlink()
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": shard_of}))
    for shard in set(shard_of.values()):
        if "/" not in shard and shard:
            save_file({name: tensors[name] for name, owner in shard_of.items() if owner == shard}, folder / shard)
    return folder


A, B = sorted(factors(LANGUAGE))


def test_several_shards(adapter: Path, tmp_path: Path) -> None:
    folder = sharded(tmp_path / "sharded", {A: "adapter_model-1.safetensors", B: "adapter_model-2.safetensors"})
    one, other = read_adapter(adapter).tensors, read_adapter(folder).tensors
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/passwd", ".hidden.safetensors", "a/b.safetensors", "x.bin", ""]
)
def test_shards_outside_the_folder(tmp_path: Path, shard: str) -> None:
    refused(sharded(tmp_path / "a", {A: shard, B: "adapter_model-1.safetensors"}), "no safetensors file of the same")


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "a", {A: "one.safetensors", B: "two.safetensors"})
    index = folder / f"{WEIGHTS}.index.json"
    index.write_text(json.dumps({"weight_map": {A: "one.safetensors"}}))
    assert read_adapter(folder).tensors.keys() == {A}  # a shard no tensor of which is named is no part of the adapter
    index.write_text(json.dumps({"weight_map": {A: "one.safetensors", B: "one.safetensors"}}))
    refused(folder, "disagree on 1 tensors")
    index.write_text(json.dumps({"weight_map": {A: "three.safetensors"}}))
    refused(folder, "'three.safetensors', which is missing")
    for content in ({}, {"weight_map": []}, {"weight_map": {A: 1}}):
        index.write_text(json.dumps(content))
        refused(folder, "has no weight_map")


def test_points_out_a_full_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "full model")


def test_no_weights(adapter: Path) -> None:
    (adapter / WEIGHTS).unlink()
    refused(adapter, "has neither adapter_model.safetensors nor")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not valid JSON"),
        (b"[]", "must hold a JSON object, not a list"),
        (b"3", "must hold a JSON object"),
        (b"{", "not valid JSON"),
        (b'{"r": 1, "r": 2}', "'r' occurs twice"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b'{"a":' * 100_000, "not valid JSON"),
        (b"[" * 1_000_000, "not valid JSON"),
        (b" " * (MAX_CONFIG_BYTES + 1), "larger than"),
        (b'{"peft_type": "LORA", "r": 1' + b"0" * 5000 + b"}", "not valid JSON|r must be"),
        (b'{"peft_type": "LORA", "r": 2, "lora_alpha": NaN}', "lora_alpha must be a finite number"),
        (b"{}", "no peft_type"),
    ],
)
def test_hostile_config(adapter: Path, content: bytes, words: str) -> None:
    (adapter / "adapter_config.json").write_bytes(content)
    refused(adapter, words)


def test_config_is_a_folder(adapter: Path) -> None:
    (adapter / "adapter_config.json").unlink()
    (adapter / "adapter_config.json").mkdir()
    refused(adapter, "has no adapter_config.json")


@pytest.mark.parametrize("name", [WEIGHTS, BIN])
@pytest.mark.parametrize("kept", [0, 1, 7, 8, 9, 100, -1])
def test_truncated(adapter: Path, binary: Path, name: str, kept: int) -> None:
    folder = adapter if name == WEIGHTS else binary
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:kept])
    refused(folder, f"{name} is not a readable")


def header(content: object, data: bytes = b"\0" * 64) -> bytes:
    text = json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 3) + b"\xff\xff\xff",
        header({"a.lora_A.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 1 << 40]}}),
        header({"a.lora_A.weight": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 64]}}),
        header({"a.lora_A.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [64, 0]}}),
        header({"a.lora_A.weight": {"dtype": "XYZ", "shape": [4, 4], "data_offsets": [0, 64]}}),
        header({"a.lora_A.weight": {"dtype": "F32", "shape": [-4, 4], "data_offsets": [0, 64]}}),
        header({"a.lora_A.weight": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 64]}}),
        header({"a.lora_A.weight": 3}),
        header(
            {
                "a.lora_A.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]},
                "a.lora_B.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]},
            }
        ),
    ],
)
def test_lying_safetensors_header(adapter: Path, content: bytes) -> None:
    (adapter / WEIGHTS).write_bytes(content)
    refused(adapter, "is not a readable safetensors file")


def test_no_tensors(adapter: Path) -> None:
    write_adapter(adapter, {})
    refused(adapter, "holds no tensors")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn, torch.bool])
def test_dtypes(adapter: Path, dtype: torch.dtype) -> None:
    write_adapter(adapter, {"a.lora_A.weight": torch.zeros(2, 2).to(dtype)})
    refused(adapter, "adapters are float32, float16 or bfloat16")


@pytest.mark.parametrize("name", ["a" * (MAX_TENSOR_NAME_CHARS + 1), "a\nb.lora_A.weight", "\x1b[31m"])
def test_tensor_names(adapter: Path, name: str) -> None:
    write_adapter(adapter, {name: torch.zeros(2, 2)})
    refused(adapter, "is not a module path")


class _Runs:
    """Would write a file when unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_bin_executes_nothing(binary: Path, tmp_path: Path) -> None:
    torch.save({"a.lora_A.weight": _Runs(tmp_path / "ran")}, binary / BIN)
    refused(binary, "is not a readable torch weights file")
    (binary / BIN).write_bytes(pickle.dumps(_Runs(tmp_path / "ran")))
    refused(binary, "is not a readable torch weights file")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([torch.zeros(2)], "must hold a dictionary"),
        ({3: torch.zeros(2)}, "must hold a dictionary"),
        ({"a": 3}, "not a dense tensor"),
        ({"a": {"b": torch.zeros(2)}}, "not a dense tensor"),
        ({"a": torch.zeros(2, 2).to_sparse()}, "not a dense tensor"),
        ({"a": torch.zeros(2, 2, device="meta")}, "not a dense tensor|not a readable"),
        ({"a": torch.zeros(1).expand(1 << 20, 1 << 20)}, "claims more values"),
    ],
)
def test_bin_content(binary: Path, content: object, words: str) -> None:
    torch.save(content, binary / BIN)
    refused(binary, words)


def test_compressed_bin(binary: Path) -> None:
    with zipfile.ZipFile(binary / BIN) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(binary / BIN, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    refused(binary, "compressed")


def test_parameters_in_bin_are_plain_tensors(binary: Path) -> None:
    tensors = {name: torch.nn.Parameter(tensor) for name, tensor in factors(LANGUAGE).items()}
    torch.save(tensors, binary / BIN)
    assert all(not tensor.requires_grad for tensor in read_adapter(binary).tensors.values())


@pytest.mark.parametrize("name", ["non_lora_trainables.bin", "vit.safetensors"])
def test_weights_beside_the_adapter(adapter: Path, name: str) -> None:
    (adapter / name).write_bytes(b"x")
    with pytest.raises(AdapterUnsupportedError, match="weights trained beside the adapter"):
        read_adapter(adapter)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from([WEIGHTS, BIN, "adapter_config.json"]))
def test_bytes_changed_at_random(adapter: Path, binary: Path, data: st.DataObject, name: str) -> None:
    """Either read, or refused as an adapter error: never anything else."""
    folder = binary if name == BIN else adapter
    original = (folder / name).read_bytes()
    content = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        (folder / name).write_bytes(bytes(content))
        read_adapter(folder)
    except (AdapterFormatError, AdapterUnsupportedError):
        pass
    finally:
        (folder / name).write_bytes(original)


def test_config_used_by_the_tests_is_valid(adapter: Path) -> None:
    assert read_adapter(adapter).options.rank == config()["r"]
