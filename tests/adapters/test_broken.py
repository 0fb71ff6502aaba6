"""A corpus of broken adapters: each is one clear error, nothing is loaded, and a good one loads afterwards."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from polylens.adapters import load_adapter
from polylens.core import Adapter, ModelLayers
from polylens.errors import AdapterError
from tests.adapters.fake_layers import IN, LANGUAGE, OUT, TOWER, config, factors, fake_layers, write_adapter

WEIGHTS = "adapter_model.safetensors"
KEY = f"base_model.model.{LANGUAGE}.lora"


def whole(folder: Path) -> None:
    write_adapter(folder, {**factors(LANGUAGE), **factors(TOWER)})


def written(**options: object) -> Callable[[Path], None]:
    return lambda folder: write_adapter(folder, factors(LANGUAGE), config(**options)) and None


def with_tensors(tensors: dict[str, torch.Tensor]) -> Callable[[Path], None]:
    return lambda folder: write_adapter(folder, tensors) and None


def with_config(text: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        whole(folder)
        (folder / "adapter_config.json").write_text(text)

    return make


def truncated(folder: Path) -> None:
    whole(folder)
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def header(change: Callable[[dict], None]) -> Callable[[Path], None]:
    """A file whose header says something else than its data."""

    def make(folder: Path) -> None:
        whole(folder)
        content = (folder / WEIGHTS).read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        told = json.loads(content[8 : 8 + length])
        change(told)
        text = json.dumps(told).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])

    return make


def shape_lie(told: dict) -> None:
    told[f"{KEY}_A.weight"]["shape"] = [1 << 40, 1 << 40]


def offset_lie(told: dict) -> None:
    told[f"{KEY}_A.weight"]["data_offsets"] = [0, 1 << 50]


def overlap(told: dict) -> None:
    told[f"{KEY}_A.weight"]["data_offsets"] = told[f"{KEY}_B.weight"]["data_offsets"]


def index_of(shard: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        whole(folder)
        (folder / WEIGHTS).rename(folder.parent / "outside.safetensors")
        content = {"weight_map": dict.fromkeys(factors(LANGUAGE), shard)}
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(content))

    return make


def swapped() -> dict[str, torch.Tensor]:
    good = factors(LANGUAGE)
    return {f"{KEY}_A.weight": good[f"{KEY}_B.weight"], f"{KEY}_B.weight": good[f"{KEY}_A.weight"]}


def other_dtype(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) for name, tensor in factors(LANGUAGE).items()}


def loha(module: str, rank: int = 2) -> dict[str, torch.Tensor]:
    shapes = {"w1_a": (OUT, rank), "w1_b": (rank, IN), "w2_a": (OUT, rank), "w2_b": (rank, IN)}
    return {f"base_model.model.{module}.hada_{slot}": torch.ones(shape) for slot, shape in shapes.items()}


def misfit() -> dict[str, torch.Tensor]:
    return {f"base_model.model.{LANGUAGE}.hada_w2_b": torch.ones(3, IN)}


def with_loha(change: Callable[[dict], object], **options: object) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        tensors = loha(LANGUAGE)
        change(tensors)
        write_adapter(folder, tensors, config(**{"peft_type": "LOHA", "alpha": 4, **options}))

    return make


def bytes_of(content: bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        whole(folder)
        (folder / WEIGHTS).write_bytes(content)

    return make


DEEP = "[" * 100_000 + "]" * 100_000

BROKEN: dict[str, Callable[[Path], None]] = {
    "truncated": truncated,
    "shape lie": header(shape_lie),
    "offset lie": header(offset_lie),
    "overlapping tensors": header(overlap),
    "huge header": lambda folder: (whole(folder), (folder / WEIGHTS).write_bytes(struct.pack("<Q", 1 << 62)))[0],
    "empty file": bytes_of(b""),
    "no tensors": with_tensors({}),
    "weights are a folder": lambda folder: (whole(folder), (folder / WEIGHTS).unlink(), (folder / WEIGHTS).mkdir())[0],
    "header is no JSON": lambda folder: (
        whole(folder),
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", 9) + b"[" * 9),
    )[0],
    "name of another type": header(lambda told: told.update({f"{KEY}_A.weight": 7})),
    "A without B": with_tensors({f"{KEY}_A.weight": torch.ones(2, IN)}),
    "B without A": with_tensors({f"{KEY}_B.weight": torch.ones(OUT, 2)}),
    "swapped": with_tensors(swapped()),
    "rank 0": with_tensors({f"{KEY}_A.weight": torch.ones(0, IN), f"{KEY}_B.weight": torch.ones(OUT, 0)}),
    "rank 0 in the config": written(r=0),
    "negative rank in the config": written(r=-2),
    "rank of a word in the config": written(r="two"),
    "rank beyond all layers in the config": written(r=1 << 40),
    "another rank in the config": written(r=3),
    "alpha NaN": with_config(json.dumps(config()).replace('"lora_alpha": 4', '"lora_alpha": NaN')),
    "alpha infinite": with_config(json.dumps(config()).replace('"lora_alpha": 4', '"lora_alpha": 1e999')),
    "no alpha": with_config(json.dumps({"peft_type": "LORA", "r": 2})),
    "values NaN": with_tensors({name: tensor * float("nan") for name, tensor in factors(LANGUAGE).items()}),
    "another model": with_tensors(factors("transformer.h.0.attn.c_attn")),
    "layer beyond the depth": with_tensors(factors("model.language_model.layers.7.self_attn.q_proj")),
    "two names, one module": with_tensors({**factors(LANGUAGE), **factors("model.layers.0.self_attn.q_proj")}),
    "two names, one whole weight": with_tensors(
        {"base_model.model.lm_head.weight": torch.ones(OUT, IN), "lm_head.weight": torch.zeros(OUT, IN)}
    ),
    "two adapter names": with_tensors(
        {**factors(LANGUAGE), **{name.replace(".weight", ".b.weight"): x for name, x in factors(TOWER).items()}}
    ),
    "half the width": with_tensors({f"{KEY}_A.weight": torch.ones(2, IN // 2), f"{KEY}_B.weight": torch.ones(OUT, 2)}),
    "quantised int8": with_tensors(other_dtype(torch.int8)),
    "quantised float8": with_tensors(other_dtype(torch.float8_e4m3fn)),
    "double": with_tensors(other_dtype(torch.float64)),
    "quantisation state": with_tensors({**factors(LANGUAGE), f"{KEY}_A.weight.absmax": torch.ones(4)}),
    "vocabulary of another size": with_tensors({"base_model.model.lm_head.weight": torch.ones(OUT + 3, IN)}),
    "no config": lambda folder: (whole(folder), (folder / "adapter_config.json").unlink())[0],
    "config is cut": with_config(json.dumps(config())[:-9]),
    "config is binary": with_config("\x00\x01"),
    "config of no kind": with_config(json.dumps({"r": 2, "lora_alpha": 4})),
    "pattern that never ends": written(rank_pattern={"(a+)+b": 2}),
    "trained module without tensors": written(modules_to_save=["lm_head"]),
    "trained biases without tensors": lambda folder: write_adapter(folder, factors(TOWER), config(bias="all")) and None,
    "trained tokens without tensors": written(trainable_token_indices=[1]),
    "config is a list": with_config("[]"),
    "config is deep": with_config(DEEP),
    "config is huge": with_config('{"a": "' + "x" * (5 << 20) + '"}'),
    "config has a key twice": with_config('{"peft_type": "LORA", "peft_type": "LORA", "r": 2, "lora_alpha": 4}'),
    "index to a parent": index_of("../outside.safetensors"),
    "index to an absolute path": index_of("/etc/hostname"),
    "index to a pipe of dots": index_of("..safetensors"),
    "index with a separator": index_of("a/b.safetensors"),
    "index with a NUL": index_of("a\0.safetensors"),
    "index to nothing": index_of("missing.safetensors"),
    "IA3": written(peft_type="IA3"),
    "LoHa with LoRA's tensors": written(peft_type="LOHA", alpha=4),
    "LoHa's tensors with LoRA's config": with_tensors(loha(LANGUAGE)),
    "half of LoHa": with_loha(lambda t: t.pop(f"base_model.model.{LANGUAGE}.hada_w2_b")),
    "LoHa that does not multiply": with_loha(lambda t: t.update(misfit())),
    "LoHa of another rank": with_loha(lambda t: None, r=3),
    "OFT": written(peft_type="OFT"),
    "prefix tuning": written(peft_type="PREFIX_TUNING"),
    "aLoRA": written(alora_invocation_tokens=[1, 2]),
    "PiSSA": written(init_lora_weights="pissa"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_adapters(tmp_path: Path, name: str) -> None:
    BROKEN[name](tmp_path / "broken")
    whole(tmp_path / "good")
    layers = fake_layers()
    with pytest.raises(AdapterError) as caught:
        load(tmp_path / "broken", layers)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    assert len(message) < 1200
    assert len(load(tmp_path / "good", layers).deltas) == 2


def load(folder: Path, layers: ModelLayers) -> Adapter:
    return load_adapter(folder, layers, name="a", dtype=torch.float32, device="cpu")[0]
