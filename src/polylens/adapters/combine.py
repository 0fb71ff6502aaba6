"""Several adapters with weights as one virtual adapter: the sum of what they add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from polylens.adapters.layer_fit import LayerFit
from polylens.core import is_finite
from polylens.errors import AdapterFormatError, AdapterUnsupportedError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Combination:
    """A weighted sum of adapters, usable wherever an adapter's path is. parts: (path or hub id, weight)."""

    parts: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, weights: Mapping[Any, float]) -> Combination:
        """weights: by path or hub id. Raises AdapterFormatError if there are none, or a weight is 0 or not finite."""
        if not isinstance(weights, Mapping) or not weights:
            raise AdapterFormatError("a combination needs one or more adapters with their weights")
        for source, weight in weights.items():
            is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not is_number or not is_finite(weight) or weight == 0:
                raise AdapterFormatError(
                    f"the weight of {str(source)!r} must be a finite number other than 0, not {weight!r}"
                )
        return cls(tuple((str(source), float(weight)) for source, weight in weights.items()))

    @classmethod
    def joined(cls, parts: Sequence[tuple[str | Path | Combination, float]]) -> Combination:
        """The sum of parts that may be sums themselves."""
        flat: list[tuple[str, float]] = []
        for source, weight in parts:
            inner = source.parts if isinstance(source, Combination) else ((str(source), 1.0),)
            flat += [(path, weight * part) for path, part in inner]
        return cls(tuple(flat))

    def __str__(self) -> str:
        return " + ".join(f"{weight:g} * {source}" for source, weight in self.parts)


def combine_fits(parts: Sequence[tuple[float, Sequence[LayerFit]]], source: str) -> tuple[LayerFit, ...]:
    """One fit a layer that adds Σ weight · scaling · B A, exactly: factors side by side, ranks add up.

    As PEFT's `add_weighted_adapter(combination_type="cat")`: weight and scaling go into A. Raises
    AdapterUnsupportedError where a part does more to a layer than add to it, for which no sum is defined.
    """
    by_layer: dict[str, list[tuple[float, LayerFit]]] = {}
    for weight, fits in parts:
        for fit in fits:
            if fit.magnitude is not None or fit.lora_bias is not None or fit.values or fit.token_ids:
                raise AdapterUnsupportedError(
                    f"{source}: {fit.spec.name} has more than factors (DoRA, biases or whole weights), "
                    "which cannot be summed; merge that adapter into the base model instead",
                    option="combination",
                )
            by_layer.setdefault(fit.spec.name, []).append((weight, fit))
    return tuple(_sum(members) for members in by_layer.values())


def _sum(members: Sequence[tuple[float, LayerFit]]) -> LayerFit:
    first = members[0][1]
    return LayerFit(
        spec=first.spec,
        trained_name=first.trained_name,
        a=torch.cat([fit.a.float() * (weight * fit.scaling) for weight, fit in members], dim=-2),
        b=torch.cat([fit.b.float() for _, fit in members], dim=-1),
        scaling=1.0,
        num_tensors=sum(fit.num_tensors for _, fit in members),
    )
