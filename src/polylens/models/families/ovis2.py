"""Ovis 2: the tokens between the tiles (start, grid, columns, rows, end) are replaced by rows of the visual table."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from polylens.core import MediaKind
from polylens.models.families.notes import FEATURE_IDS, get_features


def encode(inner: Any, kind: MediaKind, batch: Mapping[str, Tensor]) -> Any:
    """Features (rows, d) of all tokens of the pictures, in their order in the prompts."""
    ids_n = batch[FEATURE_IDS]
    output = get_features(inner, kind, {name: tensor for name, tensor in batch.items() if name != FEATURE_IDS})
    tiles, indicators = output.pooler_output, output.visual_indicator_features
    rows_nd = tiles.new_empty(len(ids_n), tiles.shape[-1])
    rows_nd[ids_n == inner.config.image_token_id] = tiles.flatten(0, 1)
    for token_id, row in zip(inner.config.visual_indicator_token_ids, indicators, strict=True):
        rows_nd[ids_n == token_id] = row
    return SimpleNamespace(pooler_output=rows_nd)
