"""Factors of projections that are split where the model's layer is fused, or fused where the model's are split.

q, k and v (or gate and up) computed by one layer are its outputs one after the other. So factors of the parts are
those of the whole with A stacked and B block-diagonal, and factors of the whole are those of each part with the
part's rows of B. Both are exact.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from polylens.adapters.layer_fit import LayerFit
from polylens.core import LayerKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from polylens.adapters.options import LoraOptions
    from polylens.adapters.pairs import FactorPair
    from polylens.core import LayerSpec

    Lookup = Callable[[str], LayerSpec | None]
    """The model's linear layer that a module path of the file means, if there is one."""

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Layers whose outputs are those of several, in this order. Others (heads interleaved, say) are not guessed at."""


def join_parts(
    pairs: Sequence[FactorPair], options: LoraOptions, lookup: Lookup
) -> tuple[list[LayerFit], list[str], list[FactorPair]]:
    """(fits of fused layers from parts in the file, what is wrong with them, the pairs that are no parts)."""
    groups: dict[tuple[str, str], dict[str, FactorPair]] = {}
    rest = []
    for pair in pairs:
        owner, _, leaf = pair.module.rpartition(".")
        whole = next((fused for fused, parts in FUSED.items() if leaf in parts and lookup(f"{owner}.{fused}")), None)
        if whole is None or lookup(pair.module) is not None:
            rest.append(pair)
        else:
            groups.setdefault((owner, whole), {})[leaf] = pair
    fits, problems = [], []
    for (owner, whole), members in groups.items():
        spec = lookup(f"{owner}.{whole}")
        assert spec is not None
        wrong = _parts_problem(members, FUSED[whole], spec, options)
        if wrong:
            problems.append(wrong)
        else:
            fits.append(_join(members, FUSED[whole], spec, options))
    return fits, problems, rest


def _parts_problem(
    members: Mapping[str, FactorPair], parts: tuple[str, ...], spec: LayerSpec, options: LoraOptions
) -> str | None:
    first = next(iter(members.values())).module
    for pair in members.values():
        if pair.magnitude is not None or pair.bias is not None or pair.a.dim() != 2:
            return (
                f"{pair.module} has more than factors, and the model computes it in one layer with others, {spec.name}"
            )
        rank = options.rank_of(pair.module)
        if not pair.has_rank(rank):
            return f"{pair.module}: rank {pair.told_rank} in the file, {rank} in adapter_config.json"
    sizes = {leaf: members[leaf].b.shape[0] for leaf in parts if leaf in members}
    if any(pair.a.shape[1] != spec.in_features for pair in members.values()) or _sizes(sizes, parts, spec) is None:
        listed = ", ".join(f"{leaf} {size}" for leaf, size in sizes.items())
        return f"{first}: the file's parts have {listed} outputs, the model's layer {spec.name} {spec.out_features}"
    return None


def _sizes(given: Mapping[str, int], parts: tuple[str, ...], spec: LayerSpec) -> dict[str, int] | None:
    """Outputs of every part, those without factors too; None where it cannot be told."""
    sizes = dict(given)
    if "k_proj" in parts:
        for one, other in (("k_proj", "v_proj"), ("v_proj", "k_proj")):
            if one in sizes:
                sizes.setdefault(other, sizes[one])
    if "gate_proj" in parts:
        size = next(iter(sizes.values()))
        sizes = dict.fromkeys(parts, size)
    missing = [leaf for leaf in parts if leaf not in sizes]
    left = spec.out_features - sum(sizes.values())
    if missing == ["k_proj", "v_proj"] and left >= 0 and left % 2 == 0:
        sizes |= {"k_proj": left // 2, "v_proj": left // 2}
    elif len(missing) == 1:
        sizes[missing[0]] = left
    return sizes if sum(sizes.values()) == spec.out_features and min(sizes.values()) > 0 else None


def _join(members: Mapping[str, FactorPair], parts: tuple[str, ...], spec: LayerSpec, options: LoraOptions) -> LayerFit:
    sizes = _sizes({leaf: pair.b.shape[0] for leaf, pair in members.items()}, parts, spec)
    assert sizes is not None
    rank = sum(pair.rank for pair in members.values())
    a, b = [], torch.zeros(spec.out_features, rank)
    row = column = 0
    for leaf in parts:
        if leaf in members:
            pair = members[leaf]
            a.append(pair.a.float() * options.scaling_of(pair.module))
            b[row : row + sizes[leaf], column : column + pair.rank] = pair.b.float()
            column += pair.rank
        row += sizes[leaf]
    names = next(iter(members.values())).module
    return LayerFit(spec, names, torch.cat(a), b, 1.0, num_tensors=2 * len(members))


def split_whole(pair: FactorPair, lookup: Lookup) -> list[tuple[FactorPair, LayerSpec]]:
    """The factors of a fused layer for each of the layers the model splits it into; empty where it does not."""
    owner, _, leaf = pair.module.rpartition(".")
    specs = [lookup(f"{owner}.{part}") for part in FUSED.get(leaf, ())]
    found = [spec for spec in specs if spec is not None and spec.kind is LayerKind.LINEAR]
    plain = pair.magnitude is None and pair.bias is None and pair.b.dim() == 2
    if not found or len(found) != len(specs) or not plain:
        return []
    if pair.b.shape[0] != sum(spec.out_features for spec in found):
        return []
    rows = torch.split(pair.b, [spec.out_features for spec in found])
    return [(replace(pair, b=part.contiguous()), spec) for part, spec in zip(rows, found, strict=True)]
