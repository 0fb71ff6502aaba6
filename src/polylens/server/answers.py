"""From what the engine gives to OpenAI's bodies: whole ones, and the pieces of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polylens.core import Completion, TokenLogprob

Decode = Callable[[int], str]
"""One token's text."""


@dataclass(frozen=True)
class Answer:
    """What all bodies of one answer share. kind: "chat" or "text"."""

    id: str
    model: str
    kind: str
    decode: Decode
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, completions: Sequence[Completion], num_prompts: int = 1) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        return {
            **self._head(streamed=False),
            "choices": [self._choice(index, completion) for index, completion in enumerate(completions)],
            "usage": usage(completions, num_prompts),
        }

    def piece(
        self,
        index: int,
        text: str,
        *,
        first: bool = False,
        logprobs: Sequence[TokenLogprob] | None = None,
        offset: int = 0,
        completion: Completion | None = None,
    ) -> dict[str, Any]:
        """A piece of a stream. first: it opens the choice. completion: it is the choice's last one."""
        reason = completion.finish_reason.value if completion is not None else None
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": self._logprobs(logprobs, offset),
            "finish_reason": reason,
        }
        if completion is not None:
            choice["stop_reason"] = completion.matched_stop
        if self.kind == "chat":
            choice["delta"] = {"role": "assistant", "content": ""} if first else {"content": text} if text else {}
        else:
            choice["text"] = text
        return {**self._head(streamed=True), "choices": [choice]}

    def usage_piece(self, completions: Sequence[Completion], num_prompts: int = 1) -> dict[str, Any]:
        """The piece after the last one, for `stream_options.include_usage`."""
        return {**self._head(streamed=True), "choices": [], "usage": usage(completions, num_prompts)}

    def _head(self, *, streamed: bool) -> dict[str, Any]:
        names = {"chat": "chat.completion.chunk" if streamed else "chat.completion", "text": "text_completion"}
        return {"id": self.id, "object": names[self.kind], "created": self.created, "model": self.model}

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        content: dict[str, Any] = (
            {"message": {"role": "assistant", "content": completion.text, "refusal": None}}
            if self.kind == "chat"
            else {"text": completion.text}
        )
        return {
            "index": index,
            **content,
            "logprobs": self._logprobs(completion.logprobs, 0),
            "finish_reason": completion.finish_reason.value,
            "stop_reason": completion.matched_stop,
        }

    def _logprobs(self, items: Sequence[TokenLogprob] | None, offset: int) -> dict[str, Any] | None:
        if items is None:
            return None
        if self.kind == "chat":
            return {"content": [self._chat_logprob(item) for item in items], "refusal": None}
        return self._text_logprobs(items, offset)

    def _chat_logprob(self, item: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token_id, logprob) for token_id, logprob in item.top]
        return {**self._token(item.token_id, item.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.decode(token_id)
        # A token can be part of a character: its text is then U+FFFD, and its bytes are not those of that sign.
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    def _text_logprobs(self, items: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        """The older form, of /v1/completions: parallel lists. offset: characters of the answer before the first."""
        tokens = [self.decode(item.token_id) for item in items]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [item.logprob for item in items],
            "top_logprobs": [{self.decode(token_id): logprob for token_id, logprob in item.top} for item in items],
            "text_offset": offsets,
        }


def usage(completions: Sequence[Completion], num_prompts: int = 1) -> dict[str, Any]:
    """Token counts of all choices. `num_prompts` prompts have equally many choices; each prompt counts once."""
    firsts = completions[:: max(1, len(completions) // num_prompts)]
    prompt = sum(completion.usage.prompt_tokens for completion in firsts)
    generated = sum(completion.usage.completion_tokens for completion in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(completion.usage.cached_tokens for completion in firsts)},
    }
