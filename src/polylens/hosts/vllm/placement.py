"""Where the layers that adapters know are in vLLM's model: its modules, and parts of its packed ones.

Names come from the model's own tables (`hf_to_vllm_mapper`, `packed_modules_mapping`, of it and of its parts), which
vLLM loads checkpoints by. Names alone are not trusted: see `proof`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from torch import nn
from vllm.model_executor.layers.conv import ConvLayerBase
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, LayerNorm, RMSNorm
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import StageMissingLayer

from polylens.core import BARE_KINDS, EXPERT_KINDS, Component, LayerKind, LayerSpec

if TYPE_CHECKING:
    from polylens.hosts.vllm.base import BaseModel

LINEAR_KINDS = (LayerKind.LINEAR, LayerKind.ROUTER)
"""Layers that are y = x Wᵀ + b in vLLM: what chooses a token's experts is one of its linear modules."""

VLLM_NORMS = (RMSNorm, GemmaRMSNorm, LayerNorm)
"""Norms of vLLM's that compute each vector by itself and read their weight when they run."""

SHARDS = {"q": 0, "k": 1, "v": 2}
"""Parts of a packed attention projection, as vLLM's tables call them."""

_BLOCK = re.compile(r"^(.*?\.)(\d+)(\..*)$")


@dataclass(frozen=True)
class Place:
    """Outputs [start, stop) of the module at `path` are the layer's."""

    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class Placement:
    """Where every layer is. absent: layers that vLLM does not build because nothing uses them. unplaced: why a layer
    cannot be adapted."""

    places: Mapping[str, Place]
    absent: tuple[str, ...]
    unplaced: Mapping[str, str]


def place_layers(base: BaseModel, model: nn.Module) -> Placement:
    """Find the layers of `base` in vLLM's `model`."""
    finder = _Finder(base, model)
    places: dict[str, Place] = {}
    absent: list[str] = []
    unplaced: dict[str, str] = {}
    for name, spec in base.layers.specs.items():
        found = finder.find(spec)
        if isinstance(found, Place):
            places[name] = found
        elif found is None:
            absent.append(name)
        else:
            unplaced[name] = found
    return Placement(places, tuple(absent), unplaced)


class _Finder:
    def __init__(self, base: BaseModel, model: nn.Module) -> None:
        self._base = base
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._mapper = _rename_mapper(model)
        self._packed = dict(_packed_names(model))

    def find(self, spec: LayerSpec) -> Place | str | None:
        """The layer's place, why it has none, or None where vLLM leaves the layer out."""
        if spec.kind in EXPERT_KINDS:
            return "vLLM computes a mixture's experts in kernels that keep their weights to themselves"
        candidates = list(self._candidates(spec))
        for path in candidates:
            if (place := self._resolve(path, spec)) is not None:
                return place
        of_encoder = spec.component is not Component.LANGUAGE_MODEL
        if of_encoder and any(self._is_beyond_last_block(path) or self._is_left_out(path) for path in candidates):
            return None
        return "vLLM's model has no such module"

    def _candidates(self, spec: LayerSpec) -> Iterator[str]:
        """Paths it may have: as the checkpoint has it, as transformers has it, through vLLM's table and without."""
        is_parameter = spec.kind in BARE_KINDS
        key = spec.name if is_parameter else f"{spec.name}.weight"
        for name in (self._base.checkpoint.stored_name(key), key):
            if name is None:
                continue
            for mapped in (self._mapper(name), name):
                if mapped is not None:
                    yield mapped if is_parameter else mapped.removesuffix(".weight")

    def _resolve(self, path: str, spec: LayerSpec) -> Place | str | None:
        if spec.kind in BARE_KINDS:
            owner = self._modules.get(path.rpartition(".")[0])
            has = owner is not None and owner._parameters.get(path.rpartition(".")[2]) is not None
            return Place(path, 0, spec.out_features) if has else None
        module = self._modules.get(path)
        if module is not None:
            return _whole(path, module, spec)
        return self._part_of_packed(path, spec)

    def _part_of_packed(self, path: str, spec: LayerSpec) -> Place | str | None:
        for child, packed, index in self._packed_names_of(path):
            module = self._modules.get(packed)
            sizes = _part_sizes(module)
            if sizes is None or index >= len(sizes):
                continue
            start = sum(sizes[:index])
            if sizes[index] != spec.out_features or module.input_size != spec.in_features:  # type: ignore[union-attr]
                return f"{child} is {sizes[index]} outputs of {packed}, and has {spec.out_features} in the checkpoint"
            return Place(packed, start, start + sizes[index])
        return None

    def _packed_names_of(self, path: str) -> Iterator[tuple[str, str, int]]:
        for (child, packed), index in self._packed.items():
            if f"{path}.".endswith(f".{child}."):
                yield child, f"{path.removesuffix(child)}{packed}", index

    def _is_beyond_last_block(self, path: str) -> bool:
        """Whether vLLM builds earlier blocks of a stack, and not this one: it stops where the features are taken."""
        match = _BLOCK.match(path)
        if match is None:
            return False
        stack = match[1].removesuffix(".")
        module = self._modules.get(stack)
        return isinstance(module, nn.ModuleList) and 0 < len(module) <= int(match[2])

    def _is_left_out(self, path: str) -> bool:
        """Whether vLLM has a place for the module and puts nothing there: CLIP's last norm, if nobody asks for it; all
        of the tower, if no request may have media."""
        parent, _, name = path.rpartition(".")
        above = accumulate(path.split("."), lambda one, part: f"{one}.{part}")
        in_missing = any(isinstance(self._modules.get(one), StageMissingLayer) for one in above)
        return in_missing or getattr(self._modules.get(parent), name, self) is None


def _whole(path: str, module: nn.Module, spec: LayerSpec) -> Place | str:
    """The layer is this module, if that is of a kind which polylens knows to change."""
    what = type(module).__name__
    shape: tuple[Any, Any]
    if spec.kind is LayerKind.LINEAR and isinstance(module, ParallelLMHead | VocabParallelEmbedding):
        shape = (module.embedding_dim, module.org_vocab_size)
    elif spec.kind in LINEAR_KINDS and isinstance(module, LinearBase):
        shape = (module.input_size, module.output_size)
    elif spec.kind is LayerKind.LINEAR and isinstance(module, nn.Linear):
        shape = (module.in_features, module.out_features)
    elif spec.kind is LayerKind.CONV and isinstance(module, ConvLayerBase | nn.Conv2d | nn.Conv3d):
        shape = (module.weight[0].numel(), module.weight.shape[0])
    elif spec.kind is LayerKind.CONV and isinstance(module, LinearBase):
        return f"{path} is a {what}, which is no convolution"
    elif spec.kind is LayerKind.EMBEDDING and isinstance(module, VocabParallelEmbedding):
        shape = (module.org_vocab_size, module.embedding_dim)
    elif spec.kind is LayerKind.NORM and isinstance(module, nn.LayerNorm):
        shape = (module.normalized_shape[-1],) * 2
    elif spec.kind in (LayerKind.NORM, LayerKind.HEAD_NORM) and isinstance(module, VLLM_NORMS):
        width = None if module.weight is None else len(module.weight)
        shape = (width, width)
    else:
        return f"{path} is vLLM's {what}, which takes no change there"
    if shape != (spec.in_features, spec.out_features):
        return f"{path} maps {shape[0]} to {shape[1]}, and the checkpoint's {spec.in_features} to {spec.out_features}"
    return Place(path, 0, spec.out_features)


def _part_sizes(module: nn.Module | None) -> list[int] | None:
    """Widths of a packed module's parts, in order."""
    sizes = getattr(module, "output_sizes", None)
    return list(sizes) if isinstance(module, LinearBase) and sizes is not None else None


def _rename_mapper(model: nn.Module) -> Any:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return (lambda name: name) if mapper is None else mapper.get_rename_mapper().map_name


def _packed_names(model: nn.Module) -> Iterator[tuple[tuple[str, str], int]]:
    """((part, packed module), index of the part) of all tables of the model and its parts; names as path endings."""
    for module in model.modules():
        for packed, parts in (getattr(module, "packed_modules_mapping", None) or {}).items():
            if len(parts) > 1:
                for index, part in enumerate(parts):
                    yield (part, packed), index
        mapper = getattr(module, "hf_to_vllm_mapper", None)
        for part, (packed, shard) in (getattr(mapper, "orig_to_new_stacked", None) or {}).items():
            at = SHARDS.get(shard) if isinstance(shard, str) else shard
            if isinstance(at, int):
                yield (part.strip("."), packed.strip(".")), at
