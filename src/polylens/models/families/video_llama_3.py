"""VideoLLaMA 3: of a video, patches that do not change from frame to frame have no token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import cat

from polylens.models.families.notes import get_features

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from polylens.core import MediaKind

_KEPT = "video_compression_mask"
"""(rows,) bool, by the processor: which feature rows have a token."""


def encode(inner: Any, kind: MediaKind, batch: Mapping[str, Tensor]) -> Any:
    """As transformers does, with the rows left out that have no token."""
    output = get_features(inner, kind, {name: x for name, x in batch.items() if name != _KEPT})
    if _KEPT in batch:
        output.pooler_output = cat(list(output.pooler_output))[batch[_KEPT]]
    return output
