"""The ingress: the server's own application, whose endpoints pass requests on to replicas.

It takes the place of `server.service.Service` in `server.app.build_app`, so that keys, limits, paths, errors and the
page are the server's. Bodies are received here and parsed by the replica that answers; only the model's name and the
addresses of pictures are looked at on the way.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

from ray import serve
from ray.exceptions import RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.responses import JSONResponse, PlainTextResponse, Response

from polylens import __version__
from polylens.errors import DeadlineError, InternalError, QueueFullError
from polylens.hosts.ray.affinity import affinity_of
from polylens.hosts.ray.loopback import stay_on_loopback
from polylens.hosts.ray.losses import ATTEMPTS, LOST
from polylens.hosts.ray.overview import joined_metrics, joined_stats
from polylens.hosts.ray.wire import call_of
from polylens.server.adapter_paths import check_loading
from polylens.server.app import build_app
from polylens.server.bodies import BodyReader, off_loop_if_large
from polylens.server.error_objects import HTTPError, error_object
from polylens.server.events import DONE, EventStream, event, unless_disconnected

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ray.serve.handle import DeploymentHandle
    from starlette.applications import Starlette
    from starlette.requests import Request

    from polylens.hosts.ray.settings import Settings
    from polylens.hosts.ray.wire import Call, Head

log = logging.getLogger(__name__)

OVERVIEW_S = 5.0
"""Longest wait for what all replicas say of themselves."""


class ErrorCount(Protocol):
    """What the application wants of a service's metrics."""

    def observe_error(self, status: int) -> None: ...


class Uncounted:
    """Errors answered by replicas are counted by them; the ingress's own are in Ray's metrics."""

    def observe_error(self, status: int) -> None:
        log.debug("answered with %d", status)


class Passing:
    """The pieces of an answer that is on its way; `abort` ends it, as the client going away does."""

    def __init__(self, pieces: Any) -> None:
        self.pieces = pieces

    def abort(self) -> None:
        self.pieces.cancel()


class RemoteService:
    """The server's endpoints (`server.app.ENDPOINTS`), answered by replicas."""

    def __init__(self, settings: Settings, engine: DeploymentHandle, desk: DeploymentHandle) -> None:
        self.options = settings.server
        self.metrics: ErrorCount = Uncounted()
        self._engine = engine
        self._answering = engine.options(stream=True)
        self._desk = desk
        self._bodies = BodyReader(settings.server.max_body_bytes)

    # ---- answered by one replica

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._pass_on(request)

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._pass_on(request)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        return await self._pass_on(request)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return await self._pass_on(request)

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        return await self._pass_on(request)

    async def _pass_on(self, request: Request) -> Response:
        with ExitStack() as holding:
            body = await self._bodies.receive(request, holding)
            affinity = await off_loop_if_large(lambda body: affinity_of(body, self.options), body)
            call = call_of(request, body, affinity)
            head, passing = await unless_disconnected(request.receive, self._first_piece(call))
            if head.whole:
                return _response(head)
            response = EventStream(_events(head, passing), [passing])  # type: ignore[list-item]  # it has an abort
            response.raw_headers = list(head.headers)
            response.at_end(holding.pop_all().close)
            return response

    async def _first_piece(self, call: Call) -> tuple[Head, Passing]:
        """The beginning of the answer, of whichever replica gives one."""
        try:
            async with asyncio.timeout(self.options.deadline_s):
                for _ in range(ATTEMPTS):
                    passing = Passing(self._answering.answer.remote(call))
                    try:
                        return await anext(passing.pieces), passing
                    except LOST as error:
                        log.warning("a replica was lost, asking another: %s", type(error).__name__)
                    except BaseException:
                        passing.abort()
                        raise
        except TimeoutError as error:
            raise DeadlineError(f"no answer within {self.options.deadline_s:g} s") from error
        except BackPressureError as error:
            raise QueueFullError("too many requests wait for a replica already; try again later") from error
        except RayTaskError as error:
            raise _internal(error) from error
        raise HTTPError(503, f"{ATTEMPTS} replicas were lost answering this; try again later", code="replica_lost")

    # ---- done by all replicas

    async def load_adapter(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter."""
        return await self._change(request)

    async def unload_adapter(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter."""
        return await self._change(request)

    async def _change(self, request: Request) -> Response:
        check_loading(self.options.adapters)
        with ExitStack() as holding:
            body = await self._bodies.receive(request, holding)
            try:
                return _response(await self._desk.change.remote(call_of(request, body)))
            except LOST as error:
                log.warning("a change of adapters was interrupted: %s", type(error).__name__)
                raise HTTPError(503, "the change was interrupted; ask again", code="replica_lost") from error
            except RayTaskError as error:
                raise _internal(error) from error

    async def metrics_text(self, request: Request) -> Response:
        """GET /metrics: of all replicas, with a label that says which."""
        answers = await self._everywhere(request)
        return PlainTextResponse(joined_metrics({name: head.body for name, head in answers}))

    async def stats(self, request: Request) -> Response:
        """GET /stats: summed over the replicas, and of each."""
        answers = await self._everywhere(request)
        return JSONResponse(joined_stats({name: head.body for name, head in answers}))

    async def _everywhere(self, request: Request) -> list[tuple[str, Head]]:
        """Every replica's name and answer, of those that there are."""
        try:
            answers = await self._engine.broadcast("whole", call_of(request, b"")).results_async(
                timeout_s=OVERVIEW_S, return_exceptions=True
            )
        except (DeploymentUnavailableError, TimeoutError) as error:
            raise HTTPError(503, "no replica answers: starting or stopping", code="not_ready") from error
        return sorted((one for one in answers if not isinstance(one, BaseException)), key=lambda one: one[0])

    # ---- the server itself

    async def health(self, _request: Request) -> Response:
        """GET /health: the ingress is alive. Ray looks after the replicas itself."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """GET /ready: some replica takes requests."""
        if not any(head.status == 200 for _, head in await self._everywhere(request)):
            raise HTTPError(503, "no replica takes requests: starting, stopping or failed", code="not_ready")
        return JSONResponse({"status": "ready"})

    async def version(self, _request: Request) -> Response:
        """GET /version."""
        return JSONResponse({"version": __version__})


def _internal(error: RayTaskError) -> InternalError:
    """What the client hears of an error of ours elsewhere; the log has the rest, which would tell of the machine."""
    log.error("a replica failed: %s", error)
    return InternalError(f"internal error ({type(error.cause).__name__}); it has been logged")


def _response(head: Head) -> Response:
    response = Response(head.body, head.status)
    response.raw_headers = list(head.headers)
    return response


async def _events(head: Head, passing: Passing) -> AsyncGenerator[bytes]:
    """The stream, which ends with an error event if its replica is lost: what was said cannot be taken back."""
    yield head.body
    try:
        async for piece in passing.pieces:
            yield piece
    except (*LOST, RayTaskError) as error:
        log.warning("a replica was lost in the middle of an answer: %s", type(error).__name__)
        lost = HTTPError(503, "the replica was lost in the middle of this answer; ask again", code="replica_lost")
        yield event(error_object(lost))
        yield DONE


@serve.ingress()
class Ingress:
    """What receives requests."""

    def __init__(self, settings: Settings, engine: DeploymentHandle, desk: DeploymentHandle) -> None:
        stay_on_loopback()
        self._service = RemoteService(settings, engine, desk)

    def __serve_build_asgi_app__(self) -> Starlette:
        return build_app(self._service)  # type: ignore[arg-type]  # it has what the application asks for
