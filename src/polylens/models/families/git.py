"""GIT: a text that goes on after its first token, `[CLS]`; the picture has no tokens in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polylens.models.families.plain_text import plain_template

TEMPLATE = "{{- cls_token -}}" + plain_template("GIT", "")


def call(processor: Any, own: Any, text: str, pictures: Sequence[Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without the token that ends a text."""
    return own(images=list(pictures) or None, text=[text], **{**options, "add_special_tokens": False})
