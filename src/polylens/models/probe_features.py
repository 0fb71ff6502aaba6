"""What an encoder's output is to the probe, and how two of them compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Features(Protocol):
    """What the text model receives for one item: `rows` (n, d) and more such tensors (deepstack)."""

    @property
    def rows(self) -> torch.Tensor: ...

    @property
    def deepstack(self) -> tuple[torch.Tensor, ...]: ...


Encode = Callable[[Sequence[Any]], Sequence[Features]]
"""Encodes a batch of the caller's own items (each a SizedItem) at once; one Features per item."""


def _slots(features: Sequence[Features]) -> list[list[torch.Tensor]]:
    """Feature tensors by slot (rows, then each deepstack level), each a list over the items."""
    return [list(tensors) for tensors in zip(*[(f.rows, *f.deepstack) for f in features], strict=True)]


def difference(actual: Sequence[Features], expected: Sequence[Features]) -> float:
    """Largest error over all features, relative to the root mean square of their slot; inf when incomparable."""
    worst = 0.0
    for ours, theirs in zip(_slots(actual), _slots(expected), strict=True):
        if [t.shape for t in ours] != [t.shape for t in theirs]:
            return math.inf
        values, reference = torch.cat(ours).cpu().double(), torch.cat(theirs).cpu().double()
        scale = reference.square().mean().sqrt().item()
        largest = (values - reference).abs().max().item()
        if scale == largest == 0:
            continue  # a slot that says nothing (Granite 4 Vision's embeddings)
        if not (math.isfinite(largest) and scale > 0):
            return math.inf
        worst = max(worst, largest / scale)
    return worst


def identical(one: Sequence[Features], other: Sequence[Features]) -> bool:
    return all(
        torch.equal(a, b)
        for ours, theirs in zip(_slots(one), _slots(other), strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )
