"""Perception LM: tiles of pictures and frames of videos go the same way, (1, all of them, 3, h, w)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor, cat

from polylens.core import MediaKind


def concat_tiles(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Items (1, tiles, 3, h, w) of any numbers of tiles become one, (1, all tiles, 3, h, w)."""
    return {name: cat([item[name] for item in items], dim=1) for name in items[0]}


def encode(inner: Any, _: MediaKind, batch: Mapping[str, Tensor]) -> Any:
    """What transformers' `get_image_features` computes of either kind, with the projector's rows tile after tile: it
    puts the rows of all tiles at one place together, where each row is computed by itself all the same."""
    (pixels,) = batch.values()
    states_tnd = inner.vision_tower(pixels.flatten(0, 1), return_dict=True).last_hidden_state
    if inner.config.vision_use_cls_token:
        states_tnd = states_tnd[:, 1:]
    projector = inner.multi_modal_projector
    features_tnd = projector.linear_2(projector.gelu(projector.linear_1(states_tnd)))
    return SimpleNamespace(pooler_output=projector.pooling(features_tnd))
