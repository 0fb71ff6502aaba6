"""InstructBLIP-Video: its processor takes four frames, which it calls images, and no pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def call(processor: Any, own: Any, text: str, pictures: Sequence[Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """One text and at most one video."""
    output = own(images=options.get("videos"), text=[text])
    return {name: value for name, value in output.items() if name != "video_metadata"}
