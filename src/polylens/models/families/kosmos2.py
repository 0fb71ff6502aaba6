"""KOSMOS-2 and 2.5: a picture's tokens stand at fixed places, before the text."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from polylens.core import MediaKind
from polylens.models.families.notes import get_features

COMMANDS = r"<grounding>|</?phrase>|</?object>|<patch_index_\d+>|</delimiter_of_multi_objects/>"
"""Tasks and places of KOSMOS-2."""
COMMANDS_2_5 = r"<ocr>|<md>|</?bbox>|<[xy]_\d+>"

MASK = "image_embeds_position_mask"


def call(processor: Any, own: Any, text: str, pictures: Sequence[Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """A batch of one text and one picture."""
    return own(images=list(pictures) or None, text=[text], **options)


def call_2_5(
    processor: Any, own: Any, text: str, pictures: Sequence[Any], options: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The same, and tensors: it cannot do without."""
    return own(images=list(pictures) or None, text=[text], **{**options, "return_tensors": "pt"})


def without_own_mask(text: Any) -> None:
    """Keep the text model from building a mask: the ragged batch has its own."""
    text._prepare_decoder_attention_mask = lambda *_: None


def encode(inner: Any, kind: MediaKind, batch: Mapping[str, Tensor]) -> Any:
    """The connector's attention is no part of the text model, although it shares its config."""
    attention = inner.image_to_text_projection.x_attn
    if attention.config is inner.config.text_config:
        attention.config = copy.copy(attention.config)
        attention.config._attn_implementation = "sdpa"
    return get_features(inner, kind, batch)
