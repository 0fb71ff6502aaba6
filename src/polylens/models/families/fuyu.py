"""Fuyu: a linear layer embeds a picture's patches, whose tokens are ordinary pieces of the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from polylens.core import MediaKind
from polylens.models.families.notes import get_features

PIECES = ("|SPEAKER|", "|NEWLINE|", "<s>", "<0x04>")
"""What the processor writes: a patch, the end of a row of them, the end of a picture, the begin of the answer."""


def call(processor: Any, own: Any, text: str, pictures: Sequence[Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """One text and at most one picture, whose patches are called `pixel_values`, (patches, d)."""
    if not pictures:
        return own(text=[text], **options)
    return own(images=list(pictures), text=[text], **options, return_legacy_image_output=False)


def encode(inner: Any, kind: MediaKind, batch: Mapping[str, Tensor]) -> Any:
    """The patches' embeddings, under the name that other families give their features."""
    output = get_features(inner, kind, batch)
    output.pooler_output = output.last_hidden_state
    return output
