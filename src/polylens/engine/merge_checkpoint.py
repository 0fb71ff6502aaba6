"""Write a checkpoint with one adapter merged into its weights, one shard in memory at a time."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from polylens.adapters.load import load_adapter
from polylens.adapters.merge import merged_parameters
from polylens.core import BARE_KINDS, EXPERT_KINDS, LayerKind
from polylens.errors import ModelLoadError, first_line
from polylens.models.outline import outline_model

if TYPE_CHECKING:
    from polylens.adapters.load import LoadReport
    from polylens.core import Adapter, LayerSpec, ModelLayers

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class MergeReport:
    """What was written where. num_changed: tensors that differ from the base model's."""

    output: str
    num_tensors: int
    num_changed: int
    num_shards: int
    untied: bool
    adapter: LoadReport


def merge_checkpoint(
    model: str | Path, adapter: str | Path, output: str | Path, *, trust_remote_code: bool = False
) -> MergeReport:
    """Write `model` with `adapter` merged to the folder `output`, in the base weights' dtypes and shards.

    output must not exist, or be empty; it appears whole or not at all. A head that is tied to the embeddings gets a
    weight of its own if the adapter changes only one of them, and the config then says so. Raises ModelLoadError
    (the checkpoint, or the output folder), AdapterError.
    """
    target = _check_output(Path(os.path.expanduser(output)))
    layers = outline_model(model, trust_remote_code=trust_remote_code)
    source = _folder_of(model)
    weights = CheckpointWeights(source, layers)
    # The config and the tokenizer beside it say how many tokens there are.
    layers = replace(layers, parameters=weights, more_tokens=False)
    loaded, report = load_adapter(adapter, layers, name="merged", dtype=torch.float32, device="cpu")
    weights.check_stored(loaded, layers.specs)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        work = Path(temporary) / "checkpoint"
        work.mkdir()
        writer = _Writer(weights, loaded, layers, work)
        writer.write()
        _copy_others(source, work)
        if writer.untied:
            _untie_config(work / "config.json")
        if target.exists():
            target.rmdir()
        work.rename(target)
    return MergeReport(str(target), writer.num_tensors, writer.num_changed, len(weights.shards), writer.untied, report)


class CheckpointWeights(Mapping[str, torch.Tensor]):
    """A checkpoint's tensors under the loaded model's names, read when asked for.

    A head that is stored only as the embeddings it is tied to is found under both names, as one tensor object. Tensors
    of which several become one of the loaded model's (single experts) are not among them, see `parts_in`.
    """

    def __init__(self, folder: Path, layers: ModelLayers) -> None:
        self.shards = _shards(folder)
        places: dict[str, list[tuple[Path, str]]] = {}
        for shard in self.shards:
            with _opened(shard) as content:
                for key in content.keys():  # noqa: SIM118
                    places.setdefault(model_name(key, layers), []).append((shard, key))
        self.stored = {name: found[0] for name, found in places.items() if len(found) == 1}
        self._parts = [place for found in places.values() if len(found) > 1 for place in found]
        self.tied = {
            other: name
            for name, parameter in layers.parameters.items()
            for other, same in layers.parameters.items()
            if other != name and same is parameter and other not in self.stored and name in self.stored
        }
        self._shared: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        own = self.tied.get(name, name)
        if own not in self.tied.values():
            return self._read(own)
        if own not in self._shared:
            self._shared[own] = self._read(own)
        return self._shared[own]

    def _read(self, name: str) -> torch.Tensor:
        shard, key = self.stored[name]
        with _opened(shard) as content:
            return content.get_tensor(key)

    def __iter__(self) -> Iterator[str]:
        yield from self.stored
        yield from self.tied

    def __len__(self) -> int:
        return len(self.stored) + len(self.tied)

    def parts_in(self, shard: Path) -> dict[str, torch.Tensor]:
        """A shard's tensors that become one with others, under their own names."""
        with _opened(shard) as content:
            return {key: content.get_tensor(key) for file, key in self._parts if file == shard}

    def check_stored(self, adapter: Adapter, specs: Mapping[str, LayerSpec]) -> None:
        """Raise ModelLoadError unless every weight that changes is a tensor of the checkpoint."""
        for layer in adapter.deltas:
            if layer not in self and f"{layer}.weight" not in self:
                raise ModelLoadError(f"the checkpoint does not store the weight of {layer} as one tensor")
            if specs[layer].kind in EXPERT_KINDS and specs[layer].in_features == specs[layer].out_features:
                raise ModelLoadError(f"{layer}: whether the checkpoint stores inputs or outputs first cannot be told")


def model_name(key: str, layers: ModelLayers) -> str:
    """The loaded model's name of a tensor of the checkpoint."""
    module, _, parameter = key.rpartition(".")
    return f"{layers.rename(module)}.{parameter}" if module else key


class _Writer:
    """Writes the shards of one merged checkpoint."""

    def __init__(self, weights: CheckpointWeights, adapter: Adapter, layers: ModelLayers, folder: Path) -> None:
        self._weights = weights
        self._folder = folder
        self._adapter = adapter
        self._layers = layers
        self._layer_of = {layers.specs[name].state_name(): name for name in adapter.deltas}
        self._index: dict[str, str] = {}
        self._num_bytes = 0
        self.num_changed = 0
        self.untied = any(self._unties(head, own) for head, own in weights.tied.items())

    @property
    def num_tensors(self) -> int:
        return len(self._index)

    def write(self) -> None:
        for shard in self._weights.shards:
            tensors = self._weights.parts_in(shard)
            for name, key in self._names_in(shard):
                tensors.update(self._tensors(name, key))
            save_file(tensors, self._folder / shard.name, metadata={"format": "pt"})
            # safetensors lets only the owner read what it writes; the folder shows what the umask allows.
            (self._folder / shard.name).chmod(self._folder.stat().st_mode & 0o666)
            self._index.update(dict.fromkeys(tensors, shard.name))
            self._num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        if len(self._weights.shards) > 1 or self._weights.shards[0].name != SINGLE_FILE:
            index = {"metadata": {"total_size": self._num_bytes}, "weight_map": self._index}
            (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")

    def _names_in(self, shard: Path) -> list[tuple[str, str]]:
        return [(name, key) for name, (file, key) in self._weights.stored.items() if file == shard]

    def _tensors(self, name: str, key: str) -> dict[str, torch.Tensor]:
        """What is written for one stored tensor: itself or its merged value, and what hangs on it."""
        written = {key: self._merged(name)}
        prefix = key.removesuffix("weight")
        if name in self._layer_of and f"{name.removesuffix('weight')}bias" not in self._weights:
            bias = self._parameters(self._layer_of[name]).get("bias")
            if bias is not None:
                written[f"{prefix}bias"] = bias.contiguous()
        for head, own in self._weights.tied.items():
            if own == name and self.untied:
                written[head] = self._merged(head)
        return written

    def _merged(self, name: str) -> torch.Tensor:
        role = "bias" if name.endswith(".bias") else "weight"
        layer = self._layer_of.get(name) or (name.removesuffix(".bias") if role == "bias" else None)
        changed = self._parameters(layer).get(role) if layer in self._adapter.deltas and layer else None
        if changed is None:
            return self._weights[name].clone()
        self.num_changed += 1
        return changed.contiguous()

    def _parameters(self, layer: str) -> dict[str, torch.Tensor]:
        spec = self._layers.specs[layer]
        kind = spec.kind
        weight = self._weights[spec.state_name()]
        bias = None if kind in BARE_KINDS else self._weights.get(f"{layer}.bias")
        sides = (spec.out_features, spec.in_features)
        own = sides[::-1] if kind is LayerKind.EXPERTS_IN_FIRST else sides
        if kind not in EXPERT_KINDS or weight.shape[1:] == own:
            return merged_parameters(self._adapter.deltas[layer], kind, weight, bias)
        # Published Qwen3-VL-MoE checkpoints store experts with inputs first; transformers turns them when loading.
        merged = merged_parameters(self._adapter.deltas[layer], kind, weight.transpose(1, 2), bias)
        return {role: value.transpose(1, 2) for role, value in merged.items()}

    def _unties(self, head: str, own: str) -> bool:
        return head in self._layer_of or own in self._layer_of


def _check_output(target: Path) -> Path:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelLoadError(f"output {str(target)!r} exists and is not an empty folder")
    return target


def _folder_of(model: str | Path) -> Path:
    folder = Path(os.path.expanduser(model))
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(str(model)))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot fetch model {str(model)!r}: {first_line(error)}") from error


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(f"{index} is not a readable index of shards") from error
        return [folder / Path(name).name for name in names]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    raise ModelLoadError(f"{str(folder)!r} has neither {SINGLE_FILE} nor {INDEX_FILE}")


def _opened(shard: Path) -> safe_open:
    try:
        return safe_open(shard, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{shard} is not a readable safetensors file: {error}") from error


def _copy_others(source: Path, target: Path) -> None:
    """Config, tokenizer, processor, code: everything of the folder that holds no weights."""
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES) and not file.name.endswith(".index.json"):
            shutil.copyfile(file, target / file.name)


def _untie_config(file: Path) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = False
    if isinstance(config.get("text_config"), dict):
        config["text_config"]["tie_word_embeddings"] = False
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")
