"""MiniCPM-V 4.6: the patches of all pictures and slices side by side in one strip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, cat


def concat_strips(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Strips (1, 3, side, length) are joined at their ends, all else along the first dimension."""
    return {
        name: cat([item[name] for item in items], dim=-1 if name.startswith("pixel_values") else 0) for name in items[0]
    }
