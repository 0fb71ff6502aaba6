"""Pictures, videos and messages for tests: small, made from a seed, different for different seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth random blobs with noise on them: no two seeds look alike to a random tower."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize((width, height), Image.BICUBIC)
    noise = rng.integers(-40, 41, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(coarse).astype(int) + noise, 0, 255).astype(np.uint8))


def video(num_frames: int, width: int, height: int, seed: int = 0) -> np.ndarray:
    """(frames, height, width, 3) uint8; neighbouring frames differ."""
    return np.stack([np.asarray(picture(width, height, seed * 1000 + index)) for index in range(num_frames)])


def user(*parts: Any) -> list[dict[str, Any]]:
    """One user message of texts (str), pictures (PIL) and videos (arrays), in the order given."""
    return [{"role": "user", "content": [_part(part) for part in parts]}]


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Image.Image):
        return {"type": "image", "image": part}
    if isinstance(part, np.ndarray):
        return {"type": "video", "video": part}
    raise TypeError(f"not a message part: {type(part).__name__}")


def pictures(sizes: Sequence[tuple[int, int]], seed: int = 0) -> list[Image.Image]:
    return [picture(width, height, seed + index) for index, (width, height) in enumerate(sizes)]
