"""IDEFICS: its processor takes texts and pictures one after the other, and fetches what looks like an address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.models.idefics.processing_idefics import is_url

from polylens.errors import RequestError

PICTURE = "<image>"

TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if not loop.first -%}{{ '\\n' }}{%- endif -%}"
    "{{ message['role'].capitalize() + ':' }}"
    "{%- if message['content'] is string -%}{{ ' ' + message['content'] }}"
    "{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{ '<image>' }}{%- else -%}{{ ' ' + part['text'] }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{ '<end_of_utterance>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '\\nAssistant:' }}{%- endif -%}"
)
"""The turns of the instructed models, as their documentation writes them."""

NOT_ADAPTABLE = {r"^lm_head(?:\.|$)": "a head in two parts, the model's own tokens and those added to it"}


def call(processor: Any, own: Any, text: str, pictures: Sequence[Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The processor's output for a text with a placeholder for each picture. Raises RequestError."""
    texts = text.split(PICTURE)
    if len(texts) != len(pictures) + 1:
        raise RequestError(
            f"placeholders do not match: the chat template writes {len(texts) - 1} for {len(pictures)} images",
            param="messages",
        )
    if any(is_url(one.strip(" ")) for one in texts):
        raise RequestError("this model's processor takes a text that is only an address for a picture", "messages")
    parts = [texts[0], *(part for pair in zip(pictures, texts[1:], strict=True) for part in pair)]
    shown = [part for part in parts if not isinstance(part, str) or part]
    given = {**options, "return_tensors": "pt", "add_end_of_utterance_token": False}  # the template writes it
    return own(text=[shown], **given)
