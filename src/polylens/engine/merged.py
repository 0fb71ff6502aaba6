"""The reference of every equality check: the base model with one adapter merged into its weights.

The merge is PEFT's where PEFT is installed, else the project's own. PEFT 0.21 finds no module for the names
older transformers wrote ("visual." for "model.visual.") and then only warns: so such a file is first written
anew with the loaded model's names, and in any case every tensor of it must afterwards be found in the model.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import save_file

from polylens.adapters.base_parameters import is_own_parameter
from polylens.adapters.load import load_adapter
from polylens.adapters.merge import merged_parameters
from polylens.adapters.names import Found, LayerNames, NotFound
from polylens.adapters.pairs import PEFT_PREFIX, pair_tensors
from polylens.adapters.read import CONFIG_FILE, SAFETENSORS_FILE, find_adapter, read_adapter, read_config
from polylens.config import EngineConfig
from polylens.core import BARE_KINDS, EXPERT_KINDS, LayerKind
from polylens.engine.adapter_files import AdapterFiles
from polylens.engine.llm import LLM
from polylens.errors import AdapterMismatchError
from polylens.models.loading import load_model
from polylens.models.parts import module_path, token_embedding

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from polylens.adapters.pairs import WholeTensor
    from polylens.core import LayerSpec
    from polylens.models.loading import LoadedModel

Reference = Literal["peft", "own"]


def default_reference() -> Reference:
    """PEFT's merge where PEFT is installed: it is independent of the project's code."""
    return "peft" if importlib.util.find_spec("peft") else "own"


def merged_llm(
    model: str | Path,
    adapter: str | Path | None,
    *,
    reference: Reference | None = None,
    config: EngineConfig | None = None,
    **overrides: Any,
) -> LLM:
    """An `LLM` without adapters over `model` with `adapter` merged into its weights (None: the base model).

    Its requests are processed as the adapter's are.

    reference: who merges; None chooses `default_reference`. config, overrides: as for `LLM`, but float32
    unless they say otherwise, as equality is defined in float32.
    Raises what loading the model or the adapter raises.
    """
    config = dataclasses.replace(config or EngineConfig(dtype="float32"), **overrides)
    loaded = load_model(model, config)
    if adapter is not None:
        merge = merge_with_peft if (reference or default_reference()) == "peft" else merge_ourselves
        merge(loaded, adapter)
        loaded = dataclasses.replace(loaded, processing=AdapterFiles(loaded, config).processing(adapter))
    return LLM.from_loaded(loaded, config=config)


@torch.no_grad()
def merge_ourselves(loaded: LoadedModel, path: str | Path) -> None:
    layers = dataclasses.replace(loaded.layers, more_tokens=False)
    adapter, _ = load_adapter(path, layers, name="merged", dtype=torch.float32, device=loaded.device)
    _untie_head(loaded, adapter.deltas)
    for name, change in adapter.deltas.items():
        spec = loaded.layers.specs[name]
        owner = loaded.model.get_submodule(spec.module)
        bias = None if spec.kind in BARE_KINDS else getattr(owner, "bias", None)
        for role, tensor in merged_parameters(change, spec.kind, owner.get_parameter(spec.parameter), bias).items():
            own_name = spec.parameter if role == "weight" else role
            setattr(owner, own_name, torch.nn.Parameter(tensor, requires_grad=False))


def merge_with_peft(loaded: LoadedModel, path: str | Path) -> None:
    """Let PEFT inject the adapter into the model, merge it and take itself out again."""
    from peft import PeftModel

    with _current_names(loaded, find_adapter(path)) as folder:
        try:
            wrapped: Any = PeftModel.from_pretrained(loaded.model, str(folder))
        except (ValueError, RuntimeError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise AdapterMismatchError(f"PEFT, the reference, cannot load {str(path)!r}: {reason}") from error
        check_all_loaded(wrapped, folder)
    try:
        # Unloads into the model it was given: `loaded.model` has the merged weights afterwards.
        wrapped.merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError) as error:  # a new bias for a layer without one, for example
        reason = " ".join(str(error).split())
        raise AdapterMismatchError(f"PEFT, the reference, cannot merge {str(path)!r}: {reason}") from error
    loaded.model.eval().requires_grad_(False)


def _untie_head(loaded: LoadedModel, changed_modules: Collection[str]) -> None:
    """Give a head that shares its weight with the embeddings its own, if the adapter changes either."""
    head, embeddings = loaded.head, token_embedding(loaded.model)
    assert isinstance(head.weight, torch.nn.Parameter)
    changed = {loaded.head_name, module_path(loaded.model, embeddings)} & set(changed_modules)
    if changed and head.weight is embeddings.weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def check_all_loaded(wrapped: torch.nn.Module, folder: Path) -> None:
    """Every tensor of the file must be in the model, with its values, and nothing else must."""
    loaded = {_bare_name(name): parameter for name, parameter in wrapped.named_parameters(remove_duplicate=False)}
    expected = {_bare_name(name): tensor for name, tensor in read_adapter(folder).tensors.items()}
    wrong = [
        name for name, tensor in expected.items() if name not in loaded or not _same(loaded[name].detach(), tensor)
    ]
    made = [name for name in loaded if ".lora_" in name]
    wanted = [name for name in expected if ".lora_" in name]
    if wrong or len(made) != len(wanted):
        raise AdapterMismatchError(
            f"PEFT, the reference, used {len(expected) - len(wrong)} of the adapter's {len(expected)} tensors and made "
            f"{len(made)}: it cannot serve as a reference for {str(folder)!r}",
            tuple(wrong),
        )


_INSIDE_PEFT = re.compile(r"\.(?:default|modules_to_save)(?=\.|$)|(?<=lora_magnitude_vector)\.(?:default|weight)")


def _bare_name(name: str) -> str:
    """A tensor's name as PEFT's file has it, from its name in a file or in PEFT's model."""
    bare = _INSIDE_PEFT.sub("", name).removeprefix(PEFT_PREFIX)
    return bare.removesuffix(".weight") if bare.endswith("lora_magnitude_vector.weight") else bare


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.float().cpu(), b.float())


@contextmanager
def _current_names(loaded: LoadedModel, folder: Path) -> Iterator[Path]:
    """The adapter's folder, or a copy with the model's own module names if the file uses others."""
    tensors = read_adapter(folder).tensors
    parts = _parts(loaded, tensors)
    if not any(name.endswith("trainable_tokens_delta") for part in parts for name in part.by_suffix):
        # PEFT trains the rows of some tokens in embedding and tied head together, everything else apart.
        _untie_head(loaded, [part.spec.name for part in parts])
    renamed = {name: tensor.contiguous() for part in parts for name, tensor in part.tensors().items()}
    renamed |= {part.name: part.value for part in _own_parameters(loaded, tensors)}
    if renamed.keys() == tensors.keys():
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="polylens-") as temporary:
        save_file(renamed, Path(temporary) / SAFETENSORS_FILE, metadata={"format": "pt"})
        config = _renamed_config(read_config(folder), parts)
        (Path(temporary) / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
        yield Path(temporary)


@dataclass(frozen=True, eq=False)
class _Part:
    """Tensors of one module in the file, and the layer of the model they are for. by_suffix: what follows the path."""

    module: str
    spec: LayerSpec
    by_suffix: Mapping[str, torch.Tensor]
    factors: bool

    def tensors(self) -> dict[str, torch.Tensor]:
        """Under the names that PEFT writes today: after a module, also where the layer is a parameter of it."""
        return {f"{PEFT_PREFIX}{self.spec.module}.{suffix}": tensor for suffix, tensor in self.by_suffix.items()}

    @property
    def trained_name(self) -> str:
        """What PEFT matched patterns against in training."""
        return f"{self.module}.{self.spec.parameter}" if self.spec.kind in BARE_KINDS else self.module


def _own_parameters(loaded: LoadedModel, tensors: Mapping[str, torch.Tensor]) -> list[WholeTensor]:
    """The file's copies of the model's parameters that are of no layer."""
    names = LayerNames(loaded.layers)
    return [part for part in pair_tensors(tensors).whole if is_own_parameter(part, names, loaded.layers)]


def _parts(loaded: LoadedModel, tensors: Mapping[str, torch.Tensor]) -> list[_Part]:
    paired = pair_tensors(tensors)
    own = {part.name for part in _own_parameters(loaded, tensors)}
    by_module = [
        *((pair.module, {_suffix(name): tensors[name] for name in pair.names}, True) for pair in paired.pairs),
        *((part.module, {_suffix(part.name): part.value}, False) for part in paired.whole if part.name not in own),
        *((part.module, {_suffix(part.name): part.rows}, False) for part in paired.tokens),
    ]
    names = LayerNames(loaded.layers)
    found = [(names.find(module), module, by_suffix, factors) for module, by_suffix, factors in by_module]
    lost = tuple(hit.reason for hit, *_ in found if isinstance(hit, NotFound))
    if lost:
        raise AdapterMismatchError(f"the adapter does not fit the model: {lost[0]}", lost)
    return [
        _Part(module, hit.spec, suffixed, factors) for hit, module, suffixed, factors in found if isinstance(hit, Found)
    ]


def _suffix(name: str) -> str:
    """What of a tensor's name follows its module's path."""
    match = re.search(r"\.((?:base_layer\.|token_adapter\.)?(?:lora_\w+(?:\..+)?|trainable_tokens_.+|[^.]+))$", name)
    return name if match is None else match[1]


def _renamed_config(config: Mapping[str, Any], parts: Sequence[_Part]) -> dict[str, Any]:
    factors = [part for part in parts if part.factors]
    saved = {part.spec.name for part in parts if not part.factors and not config.get("trainable_token_indices")}
    return {
        **config,
        "target_modules": [f.spec.name for f in factors if f.spec.kind not in _PARAMETER_KINDS],
        "target_parameters": _renamed_parameters(config, factors) or None,
        "rank_pattern": _renamed_patterns(config.get("rank_pattern") or {}, factors),
        "alpha_pattern": _renamed_patterns(config.get("alpha_pattern") or {}, factors),
        "modules_to_save": sorted(saved) if config.get("modules_to_save") else None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "exclude_modules": None,
    }


_PARAMETER_KINDS = BARE_KINDS | {LayerKind.ROUTER}
"""What PEFT reaches through `target_parameters` in today's transformers."""


def _renamed_parameters(config: Mapping[str, Any], factors: Sequence[_Part]) -> list[str]:
    kinds = {factor.spec.kind for factor in factors}
    # Which of a module's experts' parameters have factors is told by their shapes only; names match by their ends.
    kept = list(config.get("target_parameters") or []) if kinds & EXPERT_KINDS else []
    bare = [f.spec.name for f in factors if f.spec.kind is LayerKind.MATMUL]
    return [*kept, *bare, *(f"{f.spec.name}.weight" for f in factors if f.spec.kind is LayerKind.ROUTER)]


def _renamed_patterns(patterns: dict[str, Any], factors: Sequence[_Part]) -> dict[str, Any]:
    """Per-module options of the names in the file, spelled out for today's names by PEFT's own matching."""
    from peft.utils.other import get_pattern_key

    keys = {factor.spec.name: get_pattern_key(list(patterns), factor.trained_name) for factor in factors}
    return {re.escape(name): patterns[key] for name, key in keys.items() if key in patterns}
