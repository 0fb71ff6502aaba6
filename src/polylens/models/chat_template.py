"""What a chat template takes: which variables, and contents as strings or as parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jinja2
from transformers.utils.chat_template_utils import _get_template_variables

from polylens.errors import ModelLoadError, RequestError
from polylens.models.prompt import plain_data
from polylens.models.template_limit import TemplateTimeoutError, template_limit

if TYPE_CHECKING:
    from collections.abc import Mapping

_RESERVED_VARIABLES = ("messages", "add_generation_prompt", "raise_exception", "strftime_now")
"""Template variables that are not the request's to set."""


def chat_template_of(processor: Any, default: str | None) -> str:
    """The text of the template that a processor or its tokenizer has, or else the default. Raises ModelLoadError."""
    template = getattr(processor, "chat_template", None) or getattr(processor.tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    template = template or default
    if not isinstance(template, str) or not template:
        raise ModelLoadError(
            "the model has no chat template (chat_template.jinja); use an instruction-tuned checkpoint, or give one "
            "(chat_template=, --chat-template)"
        )
    return template


class ChatTemplate:
    """A template with the processor that renders it. Raises ModelLoadError if it writes no user's text.

    limit_s: how long rendering may take; None: as long as it takes.
    """

    def __init__(self, processor: Any, text: str, limit_s: float | None) -> None:
        self._processor = processor
        self._text = text
        self._limit_s = limit_s
        own = {*_RESERVED_VARIABLES, *processor.tokenizer.special_tokens_map}
        self._variables = sorted(_get_template_variables(text) - own)
        self._takes_strings = self._renders("probe", "probe")
        self._takes_parts = self._renders([{"type": "text", "text": "probe"}], "probe")
        if not (self._takes_strings or self._takes_parts):
            raise ModelLoadError("the model's chat template does not write a user's text; is it for this model?")

    def variables_from(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Only variables the template reads: transformers would pass others on as processor settings."""
        for name in given or {}:
            if name not in self._variables:
                known = ", ".join(self._variables) or "none"
                raise RequestError(
                    f"the chat template has no variable {name!r} to set; it has: {known}", param="chat_template_kwargs"
                )
        return plain_data(dict(given or {}), "chat_template_kwargs")

    def in_its_form(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Contents as strings or as parts, as far as the template takes only one of them."""
        return [
            {**message, "content": self._content_form(message["content"])} if "content" in message else message
            for message in messages
        ]

    def _content_form(self, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        # transformers hands templates an empty list for an empty string, which some of them cannot take
        if isinstance(content, str) and (not self._takes_strings or (not content and self._takes_parts)):
            return [{"type": "text", "text": content}]
        if isinstance(content, list) and not self._takes_parts:
            if any(part["type"] != "text" for part in content):
                raise RequestError("this model's chat template takes text only, no pictures or videos", "messages")
            return "\n".join(part["text"] for part in content)
        return content

    def _renders(self, content: Any, expected: str) -> bool:
        """Whether the template writes such content as text (and not as a Python list, or not at all)."""
        messages = [{"role": "user", "content": content}]
        try:
            with template_limit(self._limit_s):
                text = self._processor.apply_chat_template(messages, chat_template=self._text, tokenize=False)
        except TemplateTimeoutError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError):  # the answer is no
            return False
        return expected in text and f"'{expected}'" not in text
