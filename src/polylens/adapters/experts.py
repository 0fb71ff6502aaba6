"""Factors of a mixture's experts, whose weights are one tensor (experts, out, in), or (experts, in, out), in the model.

PEFT writes them in two ways. Since it targets parameters (`target_parameters`), A and B of all experts are one tensor
each, and the second parameter of a module is saved under the module's name, the first under its `base_layer`. Before,
when each expert was a module, the file has A and B of `experts.N.gate_proj` and so on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from polylens.adapters.layer_fit import LayerFit
from polylens.core import LayerKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from polylens.adapters.options import LoraOptions
    from polylens.adapters.pairs import FactorPair
    from polylens.core import LayerSpec

    Lookup = Callable[[str], tuple[LayerSpec, ...]]
    """The model's experts' parameters that a module path of the file means; empty where it means none."""

_ONE_EXPERT = re.compile(r"(?P<owner>.+)\.(?P<index>\d+)\.(?P<leaf>\w+)")

_LEAVES: Mapping[str, tuple[str, int]] = {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "down_proj": ("down_proj", 0),
    "w1": ("gate_up_proj", 0),
    "w3": ("gate_up_proj", 1),
    "w2": ("down_proj", 0),
}
"""Linear layers of one expert -> the parameter they are part of now, and which part of its outputs they give."""

_PARTS: Mapping[str, int] = {"gate_up_proj": 2, "down_proj": 1}
"""How many layers of an expert a parameter holds, one's outputs after the other's."""


def fit_experts(pair: FactorPair, specs: Sequence[LayerSpec], options: LoraOptions) -> tuple[LayerFit | None, str]:
    """Factors of all experts at once, on the parameter that their shapes fit; or why there is none.

    PEFT's `ParamWrapper` for n experts of rank r: A (n r, in), expert by expert; B (out, r n), rank by rank.
    """
    if _has_more_than_factors(pair) or pair.method != "LORA":
        return None, f"{pair.module} has more than factors, and the model's experts take no more"
    for spec in specs:
        if spec.kind is LayerKind.EXPERTS_IN_FIRST and spec.in_features == spec.out_features:
            return None, f"{pair.module}: which side of {spec.name} is which cannot be told, as both are equal"
        rank = options.rank_of(trained_name := f"{pair.module}.{spec.parameter}")
        turned = _turned(pair, spec)
        if turned is None:
            continue
        if pair.rank != rank * spec.num_experts:
            return None, (
                f"{pair.module}: rank {pair.rank} in the file for {spec.num_experts} experts, "
                f"{rank} for each in adapter_config.json"
            )
        a_eri, b_eor = turned
        return LayerFit(spec, trained_name, a_eri, b_eor, options.scaling_of(trained_name)), ""
    sizes = ", ".join(f"{spec.name} {spec.in_features} and {spec.out_features}" for spec in specs)
    return None, (
        f"{pair.module}: the file's factors are for {pair.a.shape[1]} inputs and {pair.b.shape[0]} outputs of all "
        f"experts, the model's have {sizes}"
    )


def _turned(pair: FactorPair, spec: LayerSpec) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A (experts, rank, in) and B (experts, out, rank); None where the shapes are not those of `spec`.

    Which side of an expert's weight PEFT took for its inputs depends on its version and on what the module says of
    itself: where it was the outputs, what it calls A is our B. (Where in and out are equal, the reading of today's
    PEFT counts.)
    """
    if pair.rank % spec.num_experts:
        return None
    rank = pair.rank // spec.num_experts
    first_erx = pair.a.reshape(spec.num_experts, rank, -1)
    second_eyr = pair.b.reshape(-1, rank, spec.num_experts).permute(2, 0, 1)
    sides = (pair.a.shape[1], pair.b.shape[0])
    if sides == (spec.in_features, spec.out_features):
        return first_erx.contiguous(), second_eyr.contiguous()
    if sides == (spec.out_features, spec.in_features):
        return second_eyr.transpose(1, 2).contiguous(), first_erx.transpose(1, 2).contiguous()
    return None


@dataclass(frozen=True, eq=False)
class _Member:
    """The factors of one layer of one expert. part: which part of the parameter's outputs they give."""

    pair: FactorPair
    expert: int
    part: int


def join_experts(
    pairs: Sequence[FactorPair], options: LoraOptions, lookup: Lookup
) -> tuple[list[LayerFit], list[str], list[FactorPair]]:
    """(fits of the experts' parameters from factors of single experts, what is wrong, the pairs of other layers)."""
    groups: dict[LayerSpec, list[_Member]] = {}
    rest = []
    for pair in pairs:
        found = _member(pair, lookup)
        if found is None:
            rest.append(pair)
        else:
            groups.setdefault(found[0], []).append(found[1])
    fits, problems = [], []
    for spec, members in groups.items():
        wrong = next((text for member in members if (text := _problem(member, spec, options))), None)
        if wrong is None:
            fits.append(_joined(members, spec, options))
        else:
            problems.append(wrong)
    return fits, problems, rest


def _member(pair: FactorPair, lookup: Lookup) -> tuple[LayerSpec, _Member] | None:
    match = _ONE_EXPERT.fullmatch(pair.module)
    if match is None or match["leaf"] not in _LEAVES:
        return None
    parameter, part = _LEAVES[match["leaf"]]
    # transformers' renaming tables may turn the path of one expert's layer into that of the whole parameter.
    specs = lookup(match["owner"]) or lookup(pair.module)
    spec = next((spec for spec in specs if spec.parameter == parameter), None)
    return None if spec is None else (spec, _Member(pair, int(match["index"]), part))


def _problem(member: _Member, spec: LayerSpec, options: LoraOptions) -> str | None:
    pair, rank = member.pair, options.rank_of(member.pair.module)
    if _has_more_than_factors(pair):
        return f"{pair.module} has more than factors, and the model computes all experts with one weight, {spec.name}"
    if member.expert >= spec.num_experts:
        return f"{pair.module}: the model has experts 0 to {spec.num_experts - 1}"
    if not pair.has_rank(rank):
        return f"{pair.module}: rank {pair.told_rank} in the file, {rank} in adapter_config.json"
    expected = (spec.in_features, spec.out_features // _PARTS[spec.parameter])
    if (pair.a.shape[1], pair.b.shape[0]) != expected:
        return (
            f"{pair.module}: the file's factors are for {pair.a.shape[1]} inputs and {pair.b.shape[0]} outputs, "
            f"the model's expert has {expected[0]} and {expected[1]}"
        )
    return None


def _joined(members: Sequence[_Member], spec: LayerSpec, options: LoraOptions) -> LayerFit:
    """A stacked over the parts, B block-diagonal, the scaling in A; zeros where an expert has no factors."""
    num_parts = _PARTS[spec.parameter]
    ranks = [max((m.pair.rank for m in members if m.part == part), default=0) for part in range(num_parts)]
    size = spec.out_features // num_parts
    a_eri = torch.zeros(spec.num_experts, sum(ranks), spec.in_features)
    b_eor = torch.zeros(spec.num_experts, spec.out_features, sum(ranks))
    for member in members:
        pair, row, column = member.pair, member.part * size, sum(ranks[: member.part])
        within = slice(column, column + pair.rank)
        a_eri[member.expert, within] = pair.a.float() * options.scaling_of(pair.module)
        b_eor[member.expert, row : row + size, within] = pair.b.float()
    name = members[0].pair.module
    return LayerFit(spec, name, a_eri, b_eor, 1.0, num_tensors=2 * len(members))


def _has_more_than_factors(pair: FactorPair) -> bool:
    return pair.embedding or pair.a.dim() != 2 or pair.magnitude is not None or pair.bias is not None
