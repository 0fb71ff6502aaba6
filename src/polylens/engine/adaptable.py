"""Which layers of a model take adapters, and which are refused and why, given the row rules that were found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from polylens.core import Component, LayerKind
from polylens.models.row_rules import RowRule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polylens.core import LayerSpec, ModelLayers
    from polylens.models.probe import ProbeResult

_SELDOM_ADAPTED = (LayerKind.NORM, LayerKind.CONV)
"""Kinds of layer that adapters seldom change: one without a proven rule is refused, and the others still mix."""


@dataclass(frozen=True)
class Adaptable:
    """specs: the layers that take adapters. refused: the others, with the reason. mixed: whether one encoder batch may
    hold several adapters."""

    specs: Mapping[str, LayerSpec]
    refused: Mapping[str, str]
    mixed: bool

    @classmethod
    def of(cls, layers: ModelLayers, probe: ProbeResult) -> Adaptable:
        refused = dict.fromkeys(probe.unreachable, "a layer that is never called")
        for name, spec in layers.specs.items():
            if spec.kind in _SELDOM_ADAPTED and probe.rules.get(name) is RowRule.UNPROVEN:
                refused.setdefault(name, "a module whose rows cannot be told apart by item")
        specs = {name: spec for name, spec in layers.specs.items() if name not in refused}
        unproven = (
            name
            for name, spec in specs.items()
            if probe.rules.get(name) is RowRule.UNPROVEN and spec.component is not Component.LANGUAGE_MODEL
        )
        return cls(specs, refused, mixed=next(unproven, None) is None)
