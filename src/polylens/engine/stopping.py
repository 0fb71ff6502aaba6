"""From tokens to text as it grows, and when an answer ends.

Text is given out only when later tokens cannot change it: a character whose bytes are not all there, and what
may be the beginning of a stop string, wait.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from polylens.core import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from polylens.core import SamplingParams

REPLACEMENT = "\ufffd"
"""What tokenizers decode bytes to that are not UTF-8, or not yet."""

MAX_CHARACTER_TOKENS = 4
"""Tokens that may share one character: UTF-8 has at most four bytes a character, a token at least one."""

MAX_HELD_TOKENS = 16
"""Tokens waiting for a character to complete before those that can no longer be part of one are let go. Keeps
the cost of a long run of broken bytes linear."""


class Detokenizer:
    """Text of a growing list of tokens: the pieces joined equal the tokenizer's `decode` of the whole list.

    (Where tokens spell bytes that are no UTF-8 the pieces may differ from it: given out is given out.)
    `hidden_ids` are tokens without text: the special tokens, when they are to be skipped.
    """

    def __init__(self, tokenizer: Any, hidden_ids: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        self._given: list[int] = []
        """The last tokens given out: decoded along, because a token's text may depend on the one before it."""
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that has become certain."""
        if token_id in self._hidden_ids:
            return ""
        self._held.append(token_id)
        text = self._decode(self._given + self._held)
        if not text.endswith(REPLACEMENT):
            return self._give(len(self._held), text)
        if len(self._held) > MAX_HELD_TOKENS:
            count = len(self._held) - MAX_CHARACTER_TOKENS
            part = self._decode(self._given + self._held[:count])
            if text.startswith(part):
                return self._give(count, part)
        return ""

    def flush(self) -> str:
        """The text of what is still held, complete or not."""
        return self._give(len(self._held), self._decode(self._given + self._held)) if self._held else ""

    def _give(self, count: int, text: str) -> str:
        """Give out the first `count` held tokens; `text` is decoded from the given and these."""
        known = self._decode(self._given) if self._given else ""
        if text == known:
            # No text of their own yet (a space piece that decoding strips at the start, or ids unknown to the
            # tokenizer): they count with the next one.
            self._held = self._held[-MAX_HELD_TOKENS:]
            return ""
        given, self._held = self._held[:count], self._held[count:]
        # Broken bytes can change how the given ones decode (byte-fallback tokenizers): then the new ones alone count.
        new = text[len(known) :] if text.startswith(known) else self._decode(given)
        self._given = given
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class StopStrings:
    """Finds the stop string that completes first in a growing text, wherever its pieces begin and end.

    When several complete at the same character, the one that began first counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; returns what cannot be part of a stop string, and the stop string once there is one.

        After a match, the text before it has been returned and the rest is dropped.
        """
        self._held += text
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if matches:
            _, at, stop = min(matches)
            certain, self._held = self._held[:at], ""
            return certain, stop
        keep = self._num_undecided()
        cut = len(self._held) - keep
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain, None

    def flush(self) -> str:
        """What is still held: the text has ended, so it is no stop string."""
        rest, self._held = self._held, ""
        return rest

    def _num_undecided(self) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0


@dataclass(frozen=True)
class OutputStep:
    """What one token added: text that is certain now, and why the answer ends, once it does.

    matched_stop: the stop string, or the id out of `stop_token_ids`, that ended it; None for the model's own
    end token.
    """

    text: str
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None


class OutputStream:
    """One answer as it grows. A stop string, and a token that ends the answer, are not part of the text."""

    def __init__(
        self, detokenizer: Detokenizer, sampling: SamplingParams, eos_token_ids: frozenset[int], max_tokens: int
    ) -> None:
        self._detokenizer = detokenizer
        self._stop_strings = StopStrings(sampling.stop)
        self._eos_token_ids = frozenset() if sampling.ignore_eos else eos_token_ids
        self._stop_token_ids = frozenset() if sampling.ignore_eos else frozenset(sampling.stop_token_ids)
        self._num_tokens_left = max_tokens

    def push(self, token_id: int) -> OutputStep:
        """Add a generated token."""
        self._num_tokens_left -= 1
        if token_id in self._stop_token_ids or token_id in self._eos_token_ids:
            matched = token_id if token_id in self._stop_token_ids else None
            return self._end(self._stop_strings.push(self._detokenizer.flush()), FinishReason.STOP, matched)
        text, stop = self._stop_strings.push(self._detokenizer.push(token_id))
        if stop is not None:
            return OutputStep(text, FinishReason.STOP, stop)
        if self._num_tokens_left > 0:
            return OutputStep(text)
        rest, stop = self._stop_strings.push(self._detokenizer.flush())
        return self._end((text + rest, stop), FinishReason.LENGTH, None)

    def complete(self, step: OutputStep) -> OutputStep:
        """End the answer with its last token, whose `push` gave `step`: its form is complete."""
        if step.finish_reason is not None:
            return step
        rest = self._end(self._stop_strings.push(self._detokenizer.flush()), FinishReason.STOP, None)
        return replace(rest, text=step.text + rest.text)

    def _end(self, found: tuple[str, str | None], reason: FinishReason, matched: int | None) -> OutputStep:
        text, stop = found
        if stop is not None:
            return OutputStep(text, FinishReason.STOP, stop)
        return OutputStep(text + self._stop_strings.flush(), reason, matched)


class OutputRules:
    """What all answers of one model share; made once, as listing a tokenizer's special tokens takes a while.

    eos_token_ids: the ids that end an answer, from the model's generation config.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._special_ids = special_token_ids(tokenizer)

    def start(
        self, sampling: SamplingParams, max_tokens: int | None = None, *, skip_special_tokens: bool = True
    ) -> OutputStream:
        """A new answer. max_tokens: a tighter bound than the request's own (the context's end)."""
        detokenizer = Detokenizer(self._tokenizer, self._special_ids if skip_special_tokens else frozenset())
        bound = sampling.max_tokens if max_tokens is None else min(max_tokens, sampling.max_tokens)
        return OutputStream(detokenizer, sampling, self._eos_token_ids, bound)


def special_token_ids(tokenizer: Any) -> frozenset[int]:
    """The ids that `tokenizer.decode(..., skip_special_tokens=True)` leaves out."""
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))
