"""From a body to the engine's requests: which adapter, which sampling, which media.

The server's endpoints and `polylens batch` both read their requests here, so they take the same.
"""

from __future__ import annotations

import dataclasses
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polylens.core import ChatRequest, TextRequest
from polylens.errors import PolylensError, RequestError
from polylens.server.answers import Answer
from polylens.server.media import media_kinds
from polylens.server.names import adapter_of
from polylens.server.requests import chat_options, include_usage, sampling_params, text_prompts
from polylens.server.schema import ChatBody, CompletionBody

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polylens.core import Request
    from polylens.engine.handle import RequestHandle
    from polylens.engine.thread import EngineThread
    from polylens.server.media import MediaSource
    from polylens.server.options import ServerOptions

GenerationBody = ChatBody | CompletionBody

ID_PREFIXES = {"chat": "chatcmpl", "text": "cmpl"}
"""Kind of answer -> how its id begins, as OpenAI's do."""


@dataclass(frozen=True)
class Asked:
    """What a body asks of the engine: requests (several for several plain prompts), each answered `copies` times.

    answer: what all bodies of the answer share. deadline_s: seconds the requests may take; None: no limit.
    """

    requests: tuple[Request, ...]
    copies: int
    answer: Answer
    deadline_s: float | None
    stream: bool
    include_usage: bool

    def answer_of(self, handles: Sequence[RequestHandle]) -> Answer:
        """The answer that `handles` give, its tokens read as they were made: all of them have the same adapter."""
        return dataclasses.replace(self.answer, decode=handles[0].token_text)

    def submit(self, thread: EngineThread, *, allow_paths: bool = False) -> list[RequestHandle]:
        """Hand all of it to the engine, or none: choices of the first request, then of the second … Raises
        PolylensError. allow_paths: whether media may name local files."""
        handles: list[RequestHandle] = []
        try:
            for one in self.requests:
                handles += thread.submit_copies(one, self.copies, deadline_s=self.deadline_s, allow_paths=allow_paths)
        except PolylensError:
            for handle in handles:
                handle.abort()
            raise
        return handles


class Intake:
    """Reads bodies for one engine, within one set of options.

    max_tokens: of an answer where neither the request nor `options.sampling` says; None: what the context leaves.
    """

    def __init__(
        self, thread: EngineThread, options: ServerOptions, media: MediaSource, max_tokens: int | None = None
    ) -> None:
        self._thread = thread
        self._options = options
        self._media = media
        self._max_tokens = max_tokens if max_tokens is not None else thread.max_model_len

    async def read(self, body: GenerationBody) -> Asked:
        """What the body asks. Raises RequestError (MediaError, …), which names the field, and UnknownAdapterError."""
        kind = "chat" if isinstance(body, ChatBody) else "text"
        name = body.request_id or f"{ID_PREFIXES[kind]}-{uuid.uuid4().hex}"
        return Asked(
            requests=await self._chat(body, name) if isinstance(body, ChatBody) else self._complete(body, name),
            copies=body.n,
            answer=Answer(name, body.model, kind, self._token_text),
            deadline_s=self._deadline(body.deadline_s),
            stream=body.stream,
            include_usage=include_usage(body),
        )

    async def _chat(self, body: ChatBody, name: str) -> tuple[Request, ...]:
        adapter = self.adapter(body.model, media_kinds(body.messages))
        sampling = sampling_params(body, self._options.sampling, self._max_tokens)
        messages = await self._media.messages(body.messages)
        return (ChatRequest(messages, adapter, sampling, name, **chat_options(body)),)

    def _complete(self, body: CompletionBody, name: str) -> tuple[Request, ...]:
        if body.mm_processor_kwargs is not None:
            field = "mm_processor_kwargs"
            raise RequestError(f"{field!r} needs pictures, which a plain prompt has none of", field)
        adapter = self.adapter(body.model, ())
        sampling = sampling_params(body, self._options.sampling, self._max_tokens)
        prompts = text_prompts(body)
        names = [name] if len(prompts) == 1 else [f"{name}-{index}" for index in range(len(prompts))]
        return tuple(
            TextRequest(prompt, adapter, sampling, one, body.cache_salt)
            for prompt, one in zip(prompts, names, strict=True)
        )

    def adapter(self, model: str, media: list[str] | tuple[str, ...]) -> str | None:
        """The adapter that `model` means (see `adapter_of`)."""
        return adapter_of(model, self._options, self._thread.registry.names(), media)

    def _token_text(self, token_id: int) -> str:
        return str(self._thread.loaded.processing.tokenizer.decode([token_id]))

    def _deadline(self, wanted: float | None) -> float | None:
        limits = [limit for limit in (wanted, self._options.deadline_s) if limit is not None]
        return min(limits) if limits else None
