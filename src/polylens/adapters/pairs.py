"""From the tensors of a file to what they are for, by their names alone: what can be said without a model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from polylens.adapters.finite import all_finite
from polylens.adapters.lycoris import lycoris_factors
from polylens.adapters.options import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

PEFT_PREFIX = "base_model.model."
"""What PEFT's wrapper adds before every module path."""

_WRAPPER_PARTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Path parts that torch.compile and FSDP put in; no module of a model is called so."""

# What PEFT calls the tensors of one module, after the module's path. The adapter's name is in some files only.
_LORA = re.compile(
    r"(?P<module>.+)\.lora_(?:"
    r"(?P<slot>[AB])(?:\.(?P<adapter>[^.]+))?\.weight"
    r"|(?P<bias>B)(?:\.(?P<bias_adapter>[^.]+))?\.bias"
    r"|embedding_(?P<embedding>[AB])(?:\.(?P<embedding_adapter>[^.]+))?"
    r"|(?P<magnitude>magnitude_vector)(?:\.(?P<magnitude_adapter>(?!weight$)[^.]+))?(?:\.weight)?"
    r")"
)
_LYCORIS = re.compile(r"(?P<module>.+)\.(?P<slot>(?:hada|lokr)_(?:w[12](?:_[ab])?|t[12]))(?:\.(?P<adapter>[^.]+))?")
_TOKENS = re.compile(r"(?P<module>.+?)(?:\.token_adapter)?\.trainable_tokens_delta(?:\.(?P<adapter>[^.]+))?")
_WHOLE = re.compile(r"(?!.*\.(?:lora_|original_module\.|trainable_tokens_))(?P<module>.+)\.(?P<parameter>[A-Za-z]\w*)")
_SAVED = re.compile(r"\.modules_to_save(?:\.default)?(?=\.)")
"""Where PEFT keeps a replaced module inside its wrapper. Its files leave this out, but with bias="all" they hold the
biases under this name once more."""
_ORIGINAL = re.compile(r"(?P<module>.+)\.original_module\.(?P<parameter>.+)")
"""The base model's parameter that a replaced module stands in for: PEFT does not compute with it."""


@dataclass(frozen=True, eq=False)
class FactorPair:
    """The two factors of one module, and what else PEFT trains beside them.

    module: its path when the adapter was trained. a: (rank, in); b: (out, rank); with further dimensions for a
    convolution. magnitude: DoRA's, one value an output. bias: of lora_B, (out,). embedding: made for an
    embedding layer (`lora_embedding_A` and `_B`). names: of all its tensors in the file.
    """

    module: str
    a: torch.Tensor
    b: torch.Tensor
    magnitude: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    embedding: bool = False
    names: tuple[str, ...] = ()
    method: str = "LORA"
    """The `peft_type` whose tensors these are."""
    given_rank: int | None = None
    """Where the method's rank is not that of the factors: the former, None if the tensors do not show it."""

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def has_rank(self, rank: int) -> bool:
        """Whether adapter_config.json may give this rank."""
        if self.method == "LORA":
            return self.rank == rank
        return self.given_rank is None or self.given_rank == rank

    @property
    def told_rank(self) -> int:
        """The method's rank as the tensors show it."""
        return self.rank if self.given_rank is None else self.given_rank

    @property
    def num_parameters(self) -> int:
        return sum(x.numel() for x in (self.a, self.b, self.magnitude, self.bias) if x is not None)


@dataclass(frozen=True, eq=False)
class WholeTensor:
    """A parameter of the model itself, saved as it is after training. name: in the file."""

    name: str
    module: str
    parameter: str
    value: torch.Tensor


@dataclass(frozen=True, eq=False)
class TrainedTokens:
    """The trained rows of an embedding; which tokens they are is in adapter_config.json. name: in the file."""

    name: str
    module: str
    rows: torch.Tensor


@dataclass(frozen=True, eq=False)
class PairedTensors:
    """All tensors of a file, sorted; and one line for every tensor or module that cannot be used."""

    pairs: tuple[FactorPair, ...]
    problems: tuple[str, ...]
    unsupported: tuple[Refusal, ...] = ()
    whole: tuple[WholeTensor, ...] = ()
    tokens: tuple[TrainedTokens, ...] = ()
    num_repeated: int = 0
    """Tensors that say once more what another one says, or that PEFT does not use either."""


def pair_tensors(tensors: Mapping[str, torch.Tensor]) -> PairedTensors:
    """Group `tensors` by module. Every tensor ends in a group or a problem, or repeats another one."""
    return _Sorting(tensors).run()


class _Sorting:
    """One run of `pair_tensors`: what has been found so far."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._slots: dict[tuple[str, int], dict[str, list[str]]] = {}
        self._lycoris: dict[str, dict[str, str]] = {}
        self._whole: dict[tuple[str, str], WholeTensor] = {}
        self._tokens: dict[str, TrainedTokens] = {}
        self._originals: list[tuple[str, tuple[str, str]]] = []
        self._adapter_names: set[str | None] = set()
        self._problems: list[str] = []
        self._num_repeated = 0

    def run(self) -> PairedTensors:
        for name in sorted(self._tensors):
            self._sort(name)
        self._check_originals()
        if len(self._adapter_names) > 1:
            listed = ", ".join(sorted(name or "(no name)" for name in self._adapter_names))
            self._problems.append(f"the file holds tensors of more than one adapter name: {listed}")
        pairs = []
        for (module, _), found in self._slots.items():
            wrong = _module_problems(module, found, self._tensors)
            self._problems += wrong
            if not wrong:
                pairs.append(_pair(module, found, self._tensors))
        pairs += self._lycoris_pairs()
        whole, tokens = tuple(self._whole.values()), tuple(self._tokens.values())
        return PairedTensors(
            tuple(pairs), tuple(self._problems), whole=whole, tokens=tokens, num_repeated=self._num_repeated
        )

    def _sort(self, name: str) -> None:
        if match := _LORA.fullmatch(name):
            self._add_slot(name, match)
        elif not all_finite(self._tensors[name]):
            self._problems.append(f"{name} holds NaN or infinity")
        elif match := _LYCORIS.fullmatch(name):
            self._add_lycoris(name, match)
        elif match := _TOKENS.fullmatch(name):
            self._add_tokens(name, trained_path(match["module"]))
        elif match := _WHOLE.fullmatch(_SAVED.sub("", name)):
            self._add_whole(WholeTensor(name, trained_path(match["module"]), match["parameter"], self._tensors[name]))
        elif match := _ORIGINAL.fullmatch(name):
            module, _, parameter = trained_path(f"{match['module']}.{match['parameter']}").rpartition(".")
            self._originals.append((name, (module, parameter)))
        else:
            self._problems.append(f"{name} is not a LoRA tensor")

    def _add_slot(self, name: str, match: re.Match[str]) -> None:
        slot, adapter = _slot_of(match)
        if slot != "magnitude":  # PEFT's own files leave the name out of magnitudes where factors have it
            self._adapter_names.add(adapter)
        # PEFT nests the wrappers of a module's parameters: the factors of the first are those of `base_layer`.
        depth = match["module"].count(".base_layer")
        self._slots.setdefault((trained_path(match["module"]), depth), {}).setdefault(slot, []).append(name)

    def _add_lycoris(self, name: str, match: re.Match[str]) -> None:
        self._adapter_names.add(match["adapter"])
        module = trained_path(match["module"])
        other = self._lycoris.setdefault(module, {}).setdefault(match["slot"], name)
        if other != name:
            self._problems.append(f"{module} has {match['slot']} twice: {other}, {name}")

    def _lycoris_pairs(self) -> list[FactorPair]:
        pairs = []
        for module, names in self._lycoris.items():
            factors = lycoris_factors({slot: self._tensors[name] for slot, name in names.items()})
            if isinstance(factors, str):
                self._problems.append(f"{module} {factors}")
                continue
            method = "LOHA" if next(iter(names)).startswith("hada") else "LOKR"
            every = tuple(names.values())
            pairs.append(
                FactorPair(module, factors.a, factors.b, names=every, method=method, given_rank=factors.config_rank)
            )
        return pairs

    def _add_tokens(self, name: str, module: str) -> None:
        if module in self._tokens:
            self._problems.append(f"{module} has trained tokens twice: {self._tokens[module].name}, {name}")
        self._tokens[module] = TrainedTokens(name, module, self._tensors[name])

    def _add_whole(self, part: WholeTensor) -> None:
        other = self._whole.setdefault((part.module, part.parameter), part)
        if other is part:
            return
        if torch.equal(other.value.float(), part.value.float()):
            self._num_repeated += 1
        else:
            self._problems.append(f"{part.module}.{part.parameter} is in the file twice: {other.name}, {part.name}")

    def _check_originals(self) -> None:
        """What a replaced module stands in for is of no use, but only if the file does replace it."""
        for name, key in self._originals:
            if key in self._whole:
                self._num_repeated += 1
            else:
                self._problems.append(f"{name}: the module is not replaced")


def trained_path(path: str) -> str:
    """A module's path in the model that was trained, without what PEFT and wrappers around it add."""
    bare = ".".join(part for part in path.split(".") if part not in _WRAPPER_PARTS)
    bare = bare.removeprefix("module.").removeprefix(PEFT_PREFIX).removeprefix("module.")
    while bare.endswith(".base_layer"):
        bare = bare.removesuffix(".base_layer")
    return bare


def _slot_of(match: re.Match[str]) -> tuple[str, str | None]:
    """What the tensor is to its module, and the adapter name in it."""
    if match["slot"]:
        return match["slot"], match["adapter"]
    if match["bias"]:
        return "bias", match["bias_adapter"]
    if match["embedding"]:
        return f"embedding_{match['embedding']}", match["embedding_adapter"]
    return "magnitude", match["magnitude_adapter"]


def _pair(module: str, slots: Mapping[str, list[str]], tensors: Mapping[str, torch.Tensor]) -> FactorPair:
    def only(slot: str) -> torch.Tensor | None:
        return tensors[slots[slot][0]] if slot in slots else None

    embedding = "embedding_A" in slots
    a, b = ("embedding_A", "embedding_B") if embedding else ("A", "B")
    names = tuple(name for found in slots.values() for name in found)
    return FactorPair(
        module, tensors[slots[a][0]], tensors[slots[b][0]], only("magnitude"), only("bias"), embedding, names
    )


_SLOT_NAMES = {
    "A": "lora_A",
    "B": "lora_B",
    "bias": "lora_B.bias",
    "embedding_A": "lora_embedding_A",
    "embedding_B": "lora_embedding_B",
    "magnitude": "lora_magnitude_vector",
}


def _module_problems(module: str, slots: Mapping[str, list[str]], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    for slot, names in slots.items():
        if len(names) > 1:
            return [f"{module} has {_SLOT_NAMES[slot]} twice: {', '.join(names)}"]
    if {"A", "B"} & slots.keys() and {"embedding_A", "embedding_B"} & slots.keys():
        return [f"{module} has factors of a linear layer and of an embedding"]
    first, second = ("embedding_A", "embedding_B") if slots.keys() & {"embedding_A", "embedding_B"} else ("A", "B")
    for slot in (first, second):
        if slot not in slots:
            return [f"{module} has no {_SLOT_NAMES[slot]}"]
    a, b = tensors[slots[first][0]], tensors[slots[second][0]]
    if a.dim() != b.dim() or a.dim() not in (2, 4, 5):
        return [f"{module}: lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)} must have two dimensions"]
    if 0 in a.shape or 0 in b.shape:
        return [f"{module}: lora_A {tuple(a.shape)} or lora_B {tuple(b.shape)} is empty (rank 0)"]
    if a.shape[0] != b.shape[1]:
        return [f"{module}: lora_A has rank {a.shape[0]}, lora_B {b.shape[1]}"]
    bad = [_SLOT_NAMES[slot] for slot, names in slots.items() if not all_finite(tensors[names[0]])]
    return [f"{module}: {' and '.join(bad)} holds NaN or infinity"] if bad else []
