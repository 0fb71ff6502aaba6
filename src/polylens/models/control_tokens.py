"""Encode a rendered conversation so that text typed by a user never becomes a control token.

A *control token* is an added token that means structure: every special token, every token the chat template
writes, and the processor's media placeholders. Added tokens that are only vocabulary (Gemma's `<b>` or its runs
of newlines) stay ordinary text. A family's notes may name ordinary pieces that mean structure (Fuyu's).

The mechanism. Before the template is rendered, the first and the last characters of control tokens are replaced,
in user text only and character for character, by stand-ins from a private-use plane that occur nowhere else
(`Escape`). So no control token in the rendered text can begin or end inside user text, also not by two
neighbouring texts being joined, and the template's own tokens are found by plain search. Afterwards the stand-ins
are turned back (`safe_tokenizer`), and:

- if the tokenizer then sees exactly the template's tokens, its ids are used: they are the processor's own;
- else a copy of the tokenizer is used in which control tokens go by secret names. The template's tokens are
  written with these names, so whatever the user typed is encoded as the plain text it is.

Either way the control tokens in the ids are compared with the template's, one by one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from polylens.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_FIRST_STAND_IN = 0x100000
"""Supplementary private-use plane B: no tokenizer or template gives its characters a meaning."""

_TRANSFORMERS_MARKERS = "\U000f0000\U000f0001"
"""transformers marks control tokens in sanitised text with these; typed ones must not look like its marks."""


class ControlTokens:
    """The control tokens of one tokenizer and template, and where they occur in a text."""

    def __init__(self, ids: Mapping[str, int], placeholders: Iterable[str] = ()) -> None:
        """placeholders: texts that the processor replaces before anything is tokenised."""
        self.ids = {content: token_id for content, token_id in ids.items() if content.strip()}
        texts = [content.strip() for content in (*self.ids, *placeholders)]
        edges = {text[0] for text in texts} | {text[-1] for text in texts}
        self.edge_chars = frozenset(edges | set(_TRANSFORMERS_MARKERS))
        self._lengths: dict[str, list[int]] = {}
        for content in sorted(self.ids, key=len, reverse=True):
            lengths = self._lengths.setdefault(content[0], [])
            if len(content) not in lengths:
                lengths.append(len(content))
        self._starts = re.compile(f"[{re.escape(''.join(self._lengths))}]") if self._lengths else re.compile("(?!)")

    def find(self, text: str) -> list[tuple[int, str]]:
        """(start, content) of every control token in `text`: leftmost first, the longest at each place."""
        return list(self._scan(text))

    def _scan(self, text: str) -> Iterator[tuple[int, str]]:
        position = 0
        while match := self._starts.search(text, position):
            start = match.start()
            content = self._at(text, start)
            position = start + (len(content) if content else 1)
            if content:
                yield start, content

    def _at(self, text: str, start: int) -> str | None:
        for length in self._lengths[text[start]]:
            candidate = text[start : start + length]
            if candidate in self.ids:
                return candidate
        return None


def control_tokens(
    tokenizer: Any,
    template: str,
    media_tokens: Iterable[str],
    placeholders: Iterable[str] = (),
    pieces: Iterable[str] = (),
) -> ControlTokens:
    """The control tokens of `tokenizer` under a chat template, with the processor's media tokens.

    placeholders: what stands for media in the template's text; they need not be tokens. pieces: see `ProcessorNotes`.
    """
    placeholders = list(placeholders)
    named = {*media_tokens, *placeholders, *(getattr(tokenizer, "chat_control_tokens", None) or ())}
    ids = {}
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special or token.content in named or token.content in template:
            ids[token.content] = token_id
    vocabulary = tokenizer.get_vocab()
    ids.update({piece: vocabulary[piece] for piece in pieces if piece in vocabulary})
    return ControlTokens(ids, placeholders)


class Escape:
    """Stand-ins for the edge characters of control tokens in one conversation's user text.

    commands: a pattern of what users type to mean just that; it stays as it is.
    """

    def __init__(
        self,
        control: ControlTokens,
        template: str,
        user_texts: Sequence[str],
        commands: re.Pattern[str] | None = None,
    ) -> None:
        self._commands = commands
        used = set(template).union(*user_texts)
        edges = sorted(control.edge_chars & set().union(*user_texts))
        free = (char for char in map(chr, range(_FIRST_STAND_IN, 0x10FFFE)) if char not in used)
        self._stand_ins = dict(zip(map(ord, edges), free, strict=False))
        if len(self._stand_ins) < len(edges):
            raise RequestError("the text uses all private-use characters of Unicode; remove some", param="messages")
        self._originals = {ord(stand_in): chr(edge) for edge, stand_in in self._stand_ins.items()}

    @property
    def is_needed(self) -> bool:
        """False when no user text holds a character that could begin or end a control token."""
        return bool(self._stand_ins)

    def hide(self, value: Any) -> Any:
        """`value` (nested dicts, lists, strings; anything else as it is) with every string escaped."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, dict):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def _hide_text(self, text: str) -> str:
        if self._commands is None:
            return text.translate(self._stand_ins)
        typed = self._commands.findall(text)
        pieces = [piece.translate(self._stand_ins) for piece in self._commands.split(text)]
        return "".join(part for pair in zip(pieces, [*typed, ""], strict=True) for part in pair)

    def restore(self, text: str) -> str:
        return text.translate(self._originals)
