"""Probe results on disk, so that a model is probed once and not at every start."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from polylens.disk_cache import DiskCache
from polylens.models.probe import ProbeResult
from polylens.models.row_rules import RowRule

PROBE_VERSION = 6
"""Raise whenever the probe may find another result for the same model."""


class ProbeCache:
    """Results in `cache_dir` (None: the default), by what describes the model's architecture."""

    def __init__(self, cache_dir: Path | None = None) -> None:
        self._results = DiskCache("row-rules", PROBE_VERSION, cache_dir)

    def path(self, facts: Mapping[str, Any]) -> Path:
        """The file for a model described by `facts` (JSON values)."""
        return self._results.path(facts)

    def load(self, facts: Mapping[str, Any], layers: Iterable[str]) -> ProbeResult | None:
        """The stored result, if there is one, it can be read and it is about exactly these layers."""
        result = self._results.load(facts, _from_json)
        return result if result is not None and result.rules.keys() == set(layers) else None

    def store(self, facts: Mapping[str, Any], result: ProbeResult) -> None:
        self._results.store(facts, _to_json(result))


def _to_json(result: ProbeResult) -> dict[str, Any]:
    return {
        "rules": {name: rule.value for name, rule in result.rules.items()},
        "noise_floor": result.noise_floor,
        "worst_error": result.worst_error,
        "contrast": result.contrast if math.isfinite(result.contrast) else None,
        "reasons": dict(result.reasons),
        "unreachable": list(result.unreachable),
    }


def _from_json(content: Mapping[str, Any]) -> ProbeResult:
    return ProbeResult(
        rules={str(name): RowRule(rule) for name, rule in content["rules"].items()},
        noise_floor=float(content["noise_floor"]),
        worst_error=float(content["worst_error"]),
        contrast=math.inf if content["contrast"] is None else float(content["contrast"]),
        reasons={str(name): str(reason) for name, reason in content["reasons"].items()},
        unreachable=tuple(str(name) for name in content["unreachable"]),
    )
