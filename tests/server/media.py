"""Pictures as clients send them."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

from tests.families.media import picture


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def png_bytes(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def png_url(image: Image.Image) -> str:
    return data_url(png_bytes(image))


def ask(text: str, *urls: str) -> list[dict[str, Any]]:
    """One user message of pictures and a text, as OpenAI's clients send it."""
    pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": text}]}]


PICTURE = picture(48, 32, seed=5)
QUESTION = "what is in the picture?"
"""Words the tiny tokenizer knows."""
