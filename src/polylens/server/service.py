"""What the server's endpoints do, one method each. What HTTP makes of it is `app.py`'s business."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import JSONResponse, PlainTextResponse, Response

from polylens import __version__
from polylens.engine.prepare import processing_of
from polylens.errors import RequestError
from polylens.server.adapter_paths import allowed_folder, check_loading
from polylens.server.bodies import BodyReader, off_loop_if_large
from polylens.server.error_objects import HTTPError
from polylens.server.events import EventStream
from polylens.server.generate import Generation
from polylens.server.intake import Intake
from polylens.server.media import MediaSource, media_kinds
from polylens.server.metrics import Metrics
from polylens.server.names import model_cards
from polylens.server.parse import parse_body
from polylens.server.schema import Body, ChatBody, CompletionBody, LoadBody, TokenizeBody, UnloadBody

if TYPE_CHECKING:
    from starlette.requests import Request

    from polylens.engine.adapter_lease import Overview
    from polylens.engine.thread import EngineThread
    from polylens.models.processing import Processing
    from polylens.server.options import ServerOptions

B = TypeVar("B", bound=Body)

log = logging.getLogger(__name__)

MAX_ADAPTERS_SHOWN = 200
"""Adapters in the answer of /stats."""

MAX_TOKENIZE_AT_ONCE = 2
"""Calls of /tokenize that run together; they have no queue of their own."""


class Service:
    """One running engine behind HTTP."""

    def __init__(self, thread: EngineThread, options: ServerOptions) -> None:
        self.thread = thread
        self.options = options
        self.metrics = Metrics(lambda: thread.stats, thread.registry.stats)
        self._loaded = thread.loaded
        self._registry = thread.registry
        self._media = MediaSource(options.media)
        self._intake = Intake(thread, options, self._media)
        self._bodies = BodyReader(options.max_body_bytes)
        self._tokenizing = asyncio.Semaphore(MAX_TOKENIZE_AT_ONCE)
        self._started = int(time.time())

    # ---- answers

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._generate(ChatBody, request)

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._generate(CompletionBody, request)

    async def _generate(self, kind: type[ChatBody] | type[CompletionBody], request: Request) -> Response:
        """Read the body, submit what it asks, all of it or nothing, and respond with the answers."""
        with ExitStack() as holding:  # closed when the response has been sent, however late that is
            body = await self._body(kind, request, holding)
            asked = await self._intake.read(body)
            if self.options.log_prompts:
                log.info("%s asks %s", asked.answer.id, body)
            generation = Generation(asked.submit(self.thread), asked, self.metrics)
            response = await generation.respond(request)
            if isinstance(response, EventStream):
                response.at_end(holding.pop_all().close)
            return response

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
        adapters = {one.name: one.source for one in self._registry.overview()}
        return model_cards(self.options, self._loaded.source, self.thread.max_model_len, adapters, self._started)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        with ExitStack() as holding:
            body = await self._body(TokenizeBody, request, holding)
            if (body.prompt is None) == (body.messages is None):
                raise RequestError("give 'prompt' or 'messages', one of them", "prompt")
            adapter = None
            if body.model is not None:
                adapter = self._intake.adapter(body.model, media_kinds(body.messages or ()))
            async with self._tokenizing:
                processing = await asyncio.to_thread(self._processing, adapter)
                ids = await self._token_ids(body, processing)
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": self.thread.max_model_len, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = processing.tokenizer.convert_ids_to_tokens(ids)
        return JSONResponse(answer)

    def _processing(self, adapter: str | None) -> Processing:
        """How requests of `adapter` become tokens. May read the adapter's files: blocks."""
        return processing_of(self._loaded, None if adapter is None else self._registry.get(adapter))

    async def _token_ids(self, body: TokenizeBody, processing: Processing) -> list[int]:
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
        check_loading(self.options.adapters)
        with ExitStack() as holding:
            body = await self._body(LoadBody, request, holding)
        if body.lora_name in self.options.model_names:
            raise RequestError(f"{body.lora_name!r} is the base model's name", "lora_name")
        began, result = time.monotonic(), "refused"
        try:
            folder = await asyncio.to_thread(allowed_folder, body.lora_path, self.options.adapters)
            report = await self.thread.load_adapter(
                body.lora_name, folder, replace=body.load_inplace, pinned=body.pinned, prefetch=body.prefetch
            )
            result = "ok" if report.changed else "unchanged"
        finally:
            self.metrics.observe_load(result, time.monotonic() - began)
        return JSONResponse({"status": "ok", "changed": report.changed, "report": report.to_json()})

    async def unload_adapter(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter."""
        check_loading(self.options.adapters)
        with ExitStack() as holding:
            body = await self._body(UnloadBody, request, holding)
        freed = await self.thread.unload_adapter(body.lora_name)
        return JSONResponse({"status": "ok", "freed_bytes": freed})

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
        overview = sorted(self._registry.overview(), key=lambda one: (not one.on_device, one.report is None))
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
                "adapters": [_adapter_card(one) for one in overview[:MAX_ADAPTERS_SHOWN]],
            }
        )

    # ---- bodies

    async def _body(self, kind: type[B], request: Request, holding: ExitStack) -> B:
        """The request's body, whose bytes count as held until `holding` is closed."""
        raw = await self._bodies.receive(request, holding)
        return await off_loop_if_large(lambda raw: parse_body(kind, raw), raw)


def _adapter_card(one: Overview) -> dict[str, Any]:
    card: dict[str, Any] = {"name": one.name, "on_device": one.on_device, "bytes": None, "components": []}
    if one.report is not None:
        card |= {"bytes": one.report.num_bytes, "components": [str(part) for part in one.report.components]}
    return card
