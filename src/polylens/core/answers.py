"""What is answered."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Usage:
    """Token counts of one request. `cached_tokens`: prompt tokens whose KV came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of a chosen token, and of the `logprobs` most likely alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Completion:
    """The answer to one request. `logits`: per generated token (vocab,) float32 if asked for."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    adapter: str | None = None
    request_id: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None
    matched_stop: str | int | None = None


@dataclass(frozen=True)
class CompletionDelta:
    """One step of a streamed answer: the new text and tokens, and the completion when it is the last.

    logprobs: of `token_ids`, if asked for. A token's text may come with a later step than the token itself.
    """

    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
