"""Granite 4 Vision: no features at the embeddings; projections of several tower levels enter several text layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import zeros_like

from polylens.models.features import ItemFeatures, split_rows

if TYPE_CHECKING:
    from polylens.models.text import TextStep


def read(output: Any, counts: Sequence[int]) -> list[ItemFeatures]:
    """Zero rows, and one deepstack level for each text layer, in the order of `text_layers`."""
    levels = [split_rows(features, counts) for features in dict(output.deepstack_features).values()]
    return [
        ItemFeatures(zeros_like(levels[0][index]), tuple(level[index] for level in levels))
        for index in range(len(counts))
    ]


def text_layers(config: Any) -> list[int]:
    """The text layers that features enter; of two for one layer, transformers uses the last."""
    entries = [*(layer for _, layer in config.deepstack_layer_map), *config.spatial_target_layers]
    return list(dict.fromkeys(entries))


def text_arguments(step: TextStep) -> dict[str, Any]:
    if step.media is None:
        return {}
    features = dict(zip(text_layers(step.config), step.media.deepstack, strict=True))
    return {"vision_mask": step.is_media_t[None, :, None], "deepstack_features": features}
