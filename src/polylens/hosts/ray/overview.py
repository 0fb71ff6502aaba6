"""What several replicas say of themselves, as one text."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?( .*)$")
"""A line of Prometheus' text form: name, labels, and the value with what follows."""


def joined_metrics(texts: Mapping[str, bytes]) -> str:
    """The /metrics of replicas by name: each sample gets the label `replica`, and families stay whole."""
    families: dict[str, list[str]] = {}
    for replica, text in texts.items():
        family = ""
        for line in text.decode().splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
            lines = families.setdefault(family, [])
            if not line.startswith("#"):
                lines.append(_labelled(line, replica))
            elif line not in lines:
                lines.append(line)
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _labelled(line: str, replica: str) -> str:
    found = _SAMPLE.match(line)
    if found is None:
        return line
    name, labels, value = found.groups()
    return f'{name}{{replica="{replica}"{"," + labels if labels else ""}}}{value}'


def joined_stats(answers: Mapping[str, bytes]) -> dict[str, Any]:
    """The /stats of replicas by name: counts summed, adapters as the first replica lists them, `replicas` as given."""
    replicas = {name: json.loads(body) for name, body in answers.items()}
    joined: dict[str, Any] = {}
    for stats in replicas.values():
        for key, value in stats.items():
            joined[key] = _sum(joined[key], value) if key in joined else value
    if replicas:
        joined["registered"] = max(stats["registered"] for stats in replicas.values())
    return {**joined, "replicas": replicas}


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, int):
        return one + other
    return dict(Counter(one) + Counter(other)) if isinstance(one, dict) else one
