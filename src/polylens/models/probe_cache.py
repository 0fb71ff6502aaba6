"""Probe results on disk, so that a model is probed once and not at every start.

A result follows from the architecture, so the key is a hash of what describes it. A file that is damaged or of
another form counts as absent: the model is probed again and the file written anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from polylens.models.probe import ProbeResult
from polylens.models.row_rules import RowRule

logger = logging.getLogger(__name__)

PROBE_VERSION = 2
"""Raise whenever the probe may find another result for the same model."""

CACHE_VARIABLE = "POLYLENS_CACHE"


def default_cache_dir() -> Path:
    """The folder $POLYLENS_CACHE names, else ~/.cache/polylens."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache" / "polylens"


class ProbeCache:
    """Results in `folder`, one JSON file each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "row-rules"

    def path(self, facts: Mapping[str, Any]) -> Path:
        """The file for a model described by `facts` (JSON values): its name is a hash of them."""
        text = json.dumps({**facts, "probe_version": PROBE_VERSION}, sort_keys=True, default=str)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"

    def load(self, facts: Mapping[str, Any], layers: Iterable[str]) -> ProbeResult | None:
        """The stored result, if there is one, it can be read and it is about exactly these layers."""
        path = self.path(facts)
        try:
            result = _from_json(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("ignoring the damaged probe result %s (%s)", path, error)
            return None
        return result if result.rules.keys() == set(layers) else None

    def store(self, facts: Mapping[str, Any], result: ProbeResult) -> None:
        """Write the result whole or not at all. A folder that cannot be written costs time, not correctness."""
        path = self.path(facts)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_atomically(path, json.dumps(_to_json(result), indent=1))
        except OSError as error:
            logger.warning("cannot keep the probe result in %s (%s): the next start probes again", path.parent, error)


def _write_atomically(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


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
