"""Fuyu: its processor places the picture before the text by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def call(processor: Any, own: Any, text: str, pictures: Sequence[Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The processor's output under the names that the model takes."""
    given = {**options, "return_legacy_image_output": False}
    return own(images=[list(pictures)] if pictures else None, text=[text], **given)
