"""From the tensors of a file to pairs of factors, by their names alone: what can be said without a model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from polylens.adapters.options import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

PEFT_PREFIX = "base_model.model."
"""What PEFT's wrapper adds before every module path."""

_WRAPPER_PARTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Path parts that torch.compile and FSDP put in; no module of a model is called so."""

_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<slot>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")

# Tensors that belong to options which are not applied, by the name PEFT gives them.
_UNSUPPORTED = (
    (re.compile(r"\.lora_magnitude_vector(\.|$)"), "use_dora", "a DoRA magnitude"),
    (re.compile(r"\.lora_[AB](\.[^.]+)?\.bias$"), "lora_bias", "a bias of the adapter"),
    (re.compile(r"\.lora_embedding_[AB](\.|$)"), "target_modules", "LoRA of an embedding"),
    (re.compile(r"\.(trainable_tokens_\w+|token_adapter)(\.|$)"), "trainable_token_indices", "trained embedding rows"),
    (re.compile(r"^(?!.*\.lora_).*\.(weight|bias)$"), "modules_to_save", "a whole weight of the model"),
)


@dataclass(frozen=True, eq=False)
class FactorPair:
    """The two factors of one module. module: its path when the adapter was trained; a: (rank, in); b: (out, rank)."""

    module: str
    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, eq=False)
class PairedTensors:
    """All tensors of a file, paired; and one line for every tensor or module that cannot be used."""

    pairs: tuple[FactorPair, ...]
    problems: tuple[str, ...]
    unsupported: tuple[Refusal, ...]


def pair_tensors(tensors: Mapping[str, torch.Tensor]) -> PairedTensors:
    """Group `tensors` by module. Every tensor ends in a pair, a problem or a refusal."""
    factors: dict[str, dict[str, list[str]]] = {}
    problems: list[str] = []
    unsupported: list[Refusal] = []
    adapter_names: set[str | None] = set()
    for name in sorted(tensors):
        match = _FACTOR.fullmatch(name)
        if match is None:
            _sort_out(name, problems, unsupported)
            continue
        adapter_names.add(match["adapter"])
        module = trained_path(match["module"])
        factors.setdefault(module, {}).setdefault(match["slot"], []).append(name)
    if len(adapter_names) > 1:
        listed = ", ".join(sorted(name or "(no name)" for name in adapter_names))
        problems.append(f"the file holds tensors of more than one adapter name: {listed}")
    pairs = []
    for module, slots in factors.items():
        found = _module_problems(module, slots, tensors)
        convolutions = [name for names in slots.values() for name in names if tensors[name].dim() in (3, 4, 5)]
        if convolutions:
            unsupported.append(Refusal("target_modules", f"{module} has factors of a convolution"))
        elif found:
            problems.extend(found)
        else:
            pairs.append(FactorPair(module, tensors[slots["A"][0]], tensors[slots["B"][0]]))
    return PairedTensors(tuple(pairs), tuple(problems), tuple(unsupported))


def trained_path(path: str) -> str:
    """A module's path in the model that was trained, without what PEFT and wrappers around it add."""
    bare = ".".join(part for part in path.split(".") if part not in _WRAPPER_PARTS)
    return bare.removeprefix("module.").removeprefix(PEFT_PREFIX).removeprefix("module.")


def _sort_out(name: str, problems: list[str], unsupported: list[Refusal]) -> None:
    for pattern, option, what in _UNSUPPORTED:
        if pattern.search(name):
            unsupported.append(Refusal(option, f"{name} is {what}"))
            return
    problems.append(f"{name} is not a LoRA tensor")


def _module_problems(module: str, slots: Mapping[str, list[str]], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    for slot in ("A", "B"):
        names = slots.get(slot, [])
        if not names:
            return [f"{module} has no lora_{slot}"]
        if len(names) > 1:
            return [f"{module} has lora_{slot} twice: {', '.join(names)}"]
    a, b = tensors[slots["A"][0]], tensors[slots["B"][0]]
    if a.dim() != 2 or b.dim() != 2:
        return [f"{module}: lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)} must have two dimensions"]
    if 0 in a.shape or 0 in b.shape:
        return [f"{module}: lora_A {tuple(a.shape)} or lora_B {tuple(b.shape)} is empty (rank 0)"]
    if a.shape[0] != b.shape[1]:
        return [f"{module}: lora_A has rank {a.shape[0]}, lora_B {b.shape[1]}"]
    bad = [f"lora_{slot}" for slot, tensor in (("A", a), ("B", b)) if not bool(torch.isfinite(tensor).all())]
    return [f"{module}: {' and '.join(bad)} holds NaN or infinity"] if bad else []
