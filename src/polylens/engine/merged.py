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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import save_file

from polylens.adapters.load import load_adapter
from polylens.adapters.merge import merged_weight, weight_key
from polylens.adapters.read import find_adapter, read_adapter, read_config
from polylens.config import EngineConfig
from polylens.engine.llm import LLM
from polylens.errors import AdapterMismatchError
from polylens.models.loading import load_model

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from polylens.models.loading import LoadedModel

Reference = Literal["peft", "own"]

_PEFT_PREFIX = "base_model.model."
"""What PEFT writes in front of every module path in an adapter's file."""

_LORA_KEY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.(?P<factor>lora_[AB])\.weight")


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

    reference: who merges; None chooses `default_reference`. config, overrides: as for `LLM`, but float32
    unless they say otherwise, as equality is defined in float32.
    Raises what loading the model or the adapter raises.
    """
    config = dataclasses.replace(config or EngineConfig(dtype="float32"), **overrides)
    loaded = load_model(model, config)
    if adapter is not None:
        merge = _merge_with_peft if (reference or default_reference()) == "peft" else _merge_ourselves
        merge(loaded, adapter)
    return LLM.from_loaded(loaded, config=config)


@torch.no_grad()
def _merge_ourselves(loaded: LoadedModel, path: str | Path) -> None:
    adapter, _ = load_adapter(path, loaded.layers, name="merged", dtype=torch.float32, device=loaded.device)
    _untie_head(loaded, adapter.deltas)
    parameters = dict(loaded.model.named_parameters())
    for name, delta in adapter.deltas.items():
        kind = loaded.layers.specs[name].kind
        weight = parameters[weight_key(name, kind)]
        weight.copy_(merged_weight(weight, delta, kind))


def _merge_with_peft(loaded: LoadedModel, path: str | Path) -> None:
    """Let PEFT inject the adapter into the model, merge it and take itself out again."""
    from peft import PeftModel

    with _current_names(loaded, find_adapter(path)) as folder:
        wrapped = PeftModel.from_pretrained(loaded.model, str(folder))
        _check_all_loaded(wrapped, folder)
    # Unloads into the model it was given: `loaded.model` has the merged weights afterwards.
    wrapped.base_model.merge_and_unload(safe_merge=True)
    loaded.model.eval().requires_grad_(False)


def _untie_head(loaded: LoadedModel, changed_modules: Collection[str]) -> None:
    """Give a head that shares its weight with the embeddings its own, if the adapter changes the head only."""
    head = loaded.head
    if loaded.head_name in changed_modules and head.weight is loaded.model.get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def _check_all_loaded(wrapped: torch.nn.Module, folder: Path) -> None:
    """Every tensor of the file must be in the model, with its values, and nothing else must."""
    loaded = {
        name.replace(".default.", ".").removeprefix(_PEFT_PREFIX): parameter
        for name, parameter in wrapped.named_parameters()
        if ".lora_" in name
    }
    expected = {name.removeprefix(_PEFT_PREFIX): tensor for name, tensor in read_adapter(folder).tensors.items()}
    wrong = [
        name for name, tensor in expected.items() if name not in loaded or not _same(loaded[name].detach(), tensor)
    ]
    if wrong or len(loaded) != len(expected):
        raise AdapterMismatchError(
            f"PEFT, the reference, used {len(expected) - len(wrong)} of the adapter's {len(expected)} tensors and made "
            f"{len(loaded)}: it cannot serve as a reference for {str(folder)!r}",
            tuple(wrong),
        )


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.float().cpu(), b.float())


@contextmanager
def _current_names(loaded: LoadedModel, folder: Path) -> Iterator[Path]:
    """The adapter's folder, or a copy with the model's own module names if the file uses others."""
    tensors = read_adapter(folder).tensors
    modules = _module_names(loaded, tensors)
    _untie_head(loaded, modules.values())
    if all(old == new for old, new in modules.items()) and all(name.startswith(_PEFT_PREFIX) for name in tensors):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="polylens-") as temporary:
        _write_renamed(Path(temporary), read_config(folder), tensors, modules)
        yield Path(temporary)


def _module_names(loaded: LoadedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Module path in the file -> module path in the loaded model."""
    matches = (_LORA_KEY.fullmatch(name) for name in tensors)
    paths = {match["module"] for match in matches if match}
    return {path: loaded.layers.rename(path) for path in paths}


def _write_renamed(
    folder: Path, config: dict[str, Any], tensors: Mapping[str, torch.Tensor], modules: dict[str, str]
) -> None:
    renamed = {}
    for name, tensor in tensors.items():
        match = _LORA_KEY.fullmatch(name)
        assert match is not None  # the engine's own reader accepted the file before
        renamed[f"{_PEFT_PREFIX}{modules[match['module']]}.{match['factor']}.weight"] = tensor.contiguous()
    save_file(renamed, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {**config, "target_modules": sorted(modules.values())}
    for option in ("rank_pattern", "alpha_pattern"):
        config[option] = _renamed_patterns(config.get(option) or {}, modules)
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def _renamed_patterns(patterns: dict[str, Any], modules: dict[str, str]) -> dict[str, Any]:
    """Per-module options of the old names, spelled out for the new ones by PEFT's own matching rule."""
    from peft.utils.other import get_pattern_key

    return {
        re.escape(new): patterns[key]
        for old, new in modules.items()
        if (key := get_pattern_key(list(patterns), old)) in patterns
    }
