"""Encoder-decoders that write a text about one picture: their prompt, if any, is the decoder's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polylens.errors import RequestError

COMMANDS = r"</?s_[^<>]*>|<s_[^<>]*/>"
"""Donut's tasks and the fields of its answers."""


def vision_encoder_decoder(
    processor: Any, own: Any, text: str, pictures: Sequence[Any], options: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Donut, Nougat, TrOCR: pixels, and the text's tokens (Donut's tasks) for the answer to go on from."""
    return {**_pixels(own, pictures), **_prompt(processor, text)}


def pix2struct(
    processor: Any, own: Any, text: str, pictures: Sequence[Any], options: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The answer goes on from the text; checkpoints for questions have it written above the picture."""
    if processor.image_processor.is_vqa:
        return own(images=_one(pictures), text=processor.tokenizer.restored(text))
    return {**_pixels(own, pictures), **_prompt(processor, text)}


def formula(
    processor: Any, own: Any, text: str, pictures: Sequence[Any], options: Mapping[str, Any]
) -> Mapping[str, Any]:
    """PP-FormulaNet: no text at all. Raises RequestError for one."""
    if text.strip():
        raise RequestError("PP-FormulaNet reads the formula in a picture: it takes no text", param="messages")
    return _pixels(own, pictures)


def _pixels(own: Any, pictures: Sequence[Any]) -> dict[str, Any]:
    return dict(own(images=_one(pictures), return_tensors="pt"))


def _one(pictures: Sequence[Any]) -> list[Any]:
    if not pictures:
        raise RequestError("this model writes about a picture: send one", param="messages")
    return list(pictures)


def _prompt(processor: Any, text: str) -> dict[str, Any]:
    if not text:
        return {}
    return {"decoder_input_ids": processor.tokenizer([text], add_special_tokens=False)["input_ids"]}
