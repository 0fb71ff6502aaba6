"""The pictures and videos of the runs inside vLLM, the same in both venvs."""

from __future__ import annotations

import numpy as np
from PIL import Image

NUM_FRAMES = (4, 2)
"""Of every second video, so that videos of one step are of unequal lengths. Not more: the text after a Qwen2.5-VL video
that is longer than wide has other positions in transformers 5.24 than in vLLM."""


def picture(index: int) -> Image.Image:
    """Pictures of noise of unequal sizes."""
    height, width = ((24, 32), (40, 24), (16, 48))[index % 3]
    return Image.fromarray(np.random.default_rng(index).integers(0, 256, (height, width, 3), dtype=np.uint8))


def video(index: int) -> np.ndarray:
    """Frames of noise."""
    shape = (NUM_FRAMES[index % 2], 24, 32, 3)
    return np.random.default_rng(100 + index).integers(0, 256, shape, dtype=np.uint8)
