"""Whether a tensor's values are all finite."""

from __future__ import annotations

import math

import torch


def all_finite(tensor: torch.Tensor) -> bool:
    """Without NaN and infinity. One pass: a sum that is finite has only finite terms."""
    return math.isfinite(float(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())
