"""What the server's endpoints do, one method each. What HTTP makes of it is `app.py`'s business."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import JSONResponse, PlainTextResponse, Response

from polylens import __version__
from polylens.core import ChatRequest, TextRequest
from polylens.errors import PolylensError, RequestError
from polylens.server.adapter_paths import allowed_folder, refuse_pickle
from polylens.server.answers import Answer
from polylens.server.bodies import BodyReader
from polylens.server.error_objects import HTTPError
from polylens.server.events import EventStream
from polylens.server.generate import Generation
from polylens.server.media import MediaSource, media_kinds
from polylens.server.metrics import Metrics
from polylens.server.names import adapter_of, model_cards
from polylens.server.parse import parse_body
from polylens.server.requests import chat_options, sampling_params, text_prompts
from polylens.server.schema import Body, ChatBody, CompletionBody, LoadBody, TokenizeBody, UnloadBody

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from polylens.adapters.load import LoadReport
    from polylens.engine.adapter_store import AdapterStore
    from polylens.engine.handle import RequestHandle
    from polylens.engine.thread import EngineThread
    from polylens.models.loading import LoadedModel
    from polylens.server.options import ServerOptions
    from polylens.server.schema import SamplingFields

B = TypeVar("B", bound=Body)

log = logging.getLogger(__name__)

LARGE_BODY_BYTES = 1 << 16
"""Bodies above this size are parsed off the loop: a picture's base64 takes milliseconds."""

MAX_ADAPTERS_SHOWN = 200
"""Adapters in the answer of /stats."""

_SETTINGS = "mm_processor_kwargs"

MAX_TOKENIZE_AT_ONCE = 2
"""Calls of /tokenize that run together; they have no queue of their own."""


class Service:
    """One running engine behind HTTP.

    loaded, registry: the engine's, of which only what is safe from any thread is used here.
    """

    def __init__(
        self, thread: EngineThread, loaded: LoadedModel, registry: AdapterStore, options: ServerOptions
    ) -> None:
        self.thread = thread
        self.options = options
        self.metrics = Metrics(lambda: thread.stats, registry.stats)
        self._loaded = loaded
        self._registry = registry
        self._media = MediaSource(options.media)
        self._bodies = BodyReader(options.max_body_bytes)
        self._tokenizing = asyncio.Semaphore(MAX_TOKENIZE_AT_ONCE)
        self._started = int(time.time())

    # ---- answers

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        with ExitStack() as holding:
            raw = await self._bodies.receive(request, holding)
            body = await self._parse(ChatBody, raw)
            del raw
            adapter = adapter_of(body.model, self.options, self._registry.names(), media_kinds(body.messages))
            sampling = sampling_params(body, self.options.sampling, self._loaded.max_model_len)
            messages = await self._media.messages(body.messages)
            answer = self._answer(body, "chat")
            if self.options.log_prompts:
                log.info("%s messages=%s", answer.id, body.messages)
            chat = ChatRequest(messages, adapter, sampling, answer.id, **chat_options(body))
            return await self._generate(request, body, [chat], answer, holding)

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        with ExitStack() as holding:
            raw = await self._bodies.receive(request, holding)
            body = await self._parse(CompletionBody, raw)
            del raw
            if body.mm_processor_kwargs is not None:
                raise RequestError("'mm_processor_kwargs' needs pictures, which a plain prompt has none of", _SETTINGS)
            adapter = adapter_of(body.model, self.options, self._registry.names(), ())
            sampling = sampling_params(body, self.options.sampling, self._loaded.max_model_len)
            answer = self._answer(body, "text")
            prompts = text_prompts(body)
            if self.options.log_prompts:
                log.info("%s prompts=%s", answer.id, prompts)
            names = [answer.id] if len(prompts) == 1 else [f"{answer.id}-{index}" for index in range(len(prompts))]
            asked = [
                TextRequest(prompt, adapter, sampling, name, body.cache_salt)
                for prompt, name in zip(prompts, names, strict=True)
            ]
            return await self._generate(request, body, asked, answer, holding)

    async def _generate(
        self,
        request: Request,
        body: SamplingFields,
        asked: Sequence[ChatRequest | TextRequest],
        answer: Answer,
        holding: ExitStack,
    ) -> Response:
        """Submit `body.n` copies of each request, all of them or none, and respond with their answers.

        holding: is closed when the response has been sent, however late that is.
        """
        include_usage = _include_usage(body)
        handles: list[RequestHandle] = []
        try:
            for one in asked:
                handles += self.thread.submit_copies(one, body.n, deadline_s=self._deadline(body))
        except PolylensError:
            for handle in handles:
                handle.abort()
            raise
        generation = Generation(handles, answer, self.metrics, num_prompts=len(asked), include_usage=include_usage)
        response = await generation.respond(request, stream=body.stream)
        if isinstance(response, EventStream):
            response.at_end(holding.pop_all().close)
        return response

    def _answer(self, body: SamplingFields, kind: str) -> Answer:
        prefix = {"chat": "chatcmpl", "text": "cmpl"}[kind]
        name = body.request_id or f"{prefix}-{uuid.uuid4().hex}"
        return Answer(name, body.model, kind, self._token_text)

    def _token_text(self, token_id: int) -> str:
        return str(self._loaded.processing.tokenizer.decode([token_id]))

    def _deadline(self, body: SamplingFields) -> float | None:
        limits = [limit for limit in (body.deadline_s, self.options.deadline_s) if limit is not None]
        return min(limits) if limits else None

    # ---- about the model

    async def models(self, _request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": self._cards()})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        name = request.path_params["name"]
        for card in self._cards():
            if card["id"] == name:
                return JSONResponse(card)
        raise HTTPError(404, f"the model {name[:200]!r} does not exist", code="model_not_found", param="model")

    def _cards(self) -> list[dict[str, Any]]:
        adapters = {name: source for name, source, _, _ in self._registry.overview()}
        return model_cards(self.options, self._loaded.source, self._loaded.max_model_len, adapters, self._started)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        with ExitStack() as holding:
            raw = await self._bodies.receive(request, holding)
            body = await self._parse(TokenizeBody, raw)
            if (body.prompt is None) == (body.messages is None):
                raise RequestError("give 'prompt' or 'messages', one of them", "prompt")
            if body.model is not None:
                adapter_of(body.model, self.options, self._registry.names(), ())
            async with self._tokenizing:
                ids = await self._token_ids(body)
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": self._loaded.max_model_len, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = self._loaded.processing.tokenizer.convert_ids_to_tokens(ids)
        return JSONResponse(answer)

    async def _token_ids(self, body: TokenizeBody) -> list[int]:
        processing = self._loaded.processing
        if body.messages is None:
            return (await asyncio.to_thread(processing.prepare_text, body.prompt or "")).token_ids
        messages = await self._media.messages(body.messages)
        prepared = await asyncio.to_thread(
            processing.prepare,
            messages,
            add_generation_prompt=body.add_generation_prompt,
            chat_template_kwargs=body.chat_template_kwargs,
            allow_paths=False,
        )
        return prepared.token_ids

    # ---- adapters

    async def load_adapter(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter."""
        self._require_loading()
        with ExitStack() as holding:
            raw = await self._bodies.receive(request, holding)
            body = await self._parse(LoadBody, raw)
        if body.lora_name in self.options.model_names:
            raise RequestError(f"{body.lora_name!r} is the base model's name", "lora_name")
        began, result = time.monotonic(), "refused"
        try:
            folder = await asyncio.to_thread(allowed_folder, body.lora_path, self.options.adapters)
            refuse_pickle(folder)
            report = await self.thread.load_adapter(
                body.lora_name, folder, replace=body.load_inplace, pinned=body.pinned, prefetch=body.prefetch
            )
            result = "ok" if report.changed else "unchanged"
        finally:
            self.metrics.observe_load(result, time.monotonic() - began)
        return JSONResponse({"status": "ok", "changed": report.changed, "report": report.to_json()})

    async def unload_adapter(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter."""
        self._require_loading()
        with ExitStack() as holding:
            raw = await self._bodies.receive(request, holding)
            body = await self._parse(UnloadBody, raw)
        freed = await self.thread.unload_adapter(body.lora_name)
        return JSONResponse({"status": "ok", "freed_bytes": freed})

    def _require_loading(self) -> None:
        if not self.options.adapters.loading:
            raise HTTPError(403, "adapters are not loaded over HTTP here (--enable-adapter-loading)", code="disabled")

    # ---- the server itself

    async def health(self, _request: Request) -> Response:
        """GET /health: the process is alive, and its engine has not failed."""
        if self.thread.failure is not None:
            raise HTTPError(503, str(self.thread.failure), code="engine_failed")
        return JSONResponse({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        """GET /ready: new requests are taken."""
        if not self.thread.ready:
            raise HTTPError(503, "not taking requests: starting, stopping or failed", code="not_ready")
        return JSONResponse({"status": "ready"})

    async def version(self, _request: Request) -> Response:
        """GET /version."""
        return JSONResponse({"version": __version__})

    async def metrics_text(self, _request: Request) -> Response:
        """GET /metrics, in Prometheus' text form."""
        from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

        return PlainTextResponse(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def stats(self, _request: Request) -> Response:
        """GET /stats: what the page shows of queue, caches and adapters."""
        stats = self.thread.stats
        # Those in memory first: there may be thousands that nobody has asked for.
        overview = sorted(self._registry.overview(), key=lambda one: (not one[3], one[2] is None))
        return JSONResponse(
            {
                "model": self.options.model_names[0],
                "version": __version__,
                "running": dict(stats.running),
                "waiting": dict(stats.waiting),
                "in_flight": self.thread.num_in_flight,
                "kv_pages": stats.kv_pages,
                "kv_pages_used": stats.kv_pages_used,
                "kv_pages_cached": stats.kv_pages_cached,
                "prompt_tokens": stats.prompt_tokens_total,
                "cached_tokens": stats.cached_tokens_total,
                "vision_hits": stats.vision_hits_total,
                "vision_misses": stats.vision_misses_total,
                "preemptions": stats.num_preemptions_total,
                "registered": len(overview),
                "adapters": [_adapter_card(*one) for one in overview[:MAX_ADAPTERS_SHOWN]],
            }
        )

    # ---- bodies

    async def _parse(self, kind: type[B], raw: bytes) -> B:
        if len(raw) < LARGE_BODY_BYTES:
            return parse_body(kind, raw)
        return await asyncio.to_thread(parse_body, kind, raw)


def _adapter_card(name: str, _source: str, report: LoadReport | None, on_device: bool) -> dict[str, Any]:
    card: dict[str, Any] = {"name": name, "on_device": on_device, "bytes": None, "components": []}
    if report is not None:
        card |= {"bytes": report.num_bytes, "components": [str(part) for part in report.components]}
    return card


def _include_usage(body: SamplingFields) -> bool:
    if body.stream_options is not None and not body.stream:
        raise RequestError("'stream_options' needs 'stream': true", "stream_options")
    return body.stream_options is not None and body.stream_options.include_usage
