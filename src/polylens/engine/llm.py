"""The Python API: one model, many adapters, mixed in one batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from polylens.adapters.combine import Combination
from polylens.config import EngineConfig
from polylens.core import ChatRequest, Completion, Request, SamplingParams, TextRequest
from polylens.engine.engine import Engine, StepOutput
from polylens.engine.prepare import processing_of
from polylens.engine.progress import progress_bar
from polylens.errors import AbortedError, AdapterError, PolylensError, RequestError, ShuttingDownError
from polylens.models.loading import LoadedModel, load_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from polylens.adapters.load import LoadReport
    from polylens.core import CompletionDelta
    from polylens.engine.adapter_lease import Unloaded
    from polylens.engine.adapter_store import AdapterStore
    from polylens.models.processing import Processing


class LLM:
    """A vision-language model with LoRA adapters, each request naming its own.

    model: a local folder or a hub id. adapters: name -> folder or hub id of a PEFT LoRA. chat_template: the text of
    one (Jinja), in place of the model's own.
    Further keyword arguments are fields of `EngineConfig` (dtype, device, kv_bytes, …).

        llm = LLM("Qwen/Qwen2.5-VL-3B-Instruct", adapters={"gauges": "./gauges-lora"})
        answer = llm.chat([{"role": "user", "content": [
            {"type": "image", "image": "gauge.png"},
            {"type": "text", "text": "What does it read?"}]}], adapter="gauges")
        print(answer.text)

    Raises ModelLoadError or AdapterError, and then nothing is loaded. Not thread-safe: one thread at a time.
    """

    def __init__(
        self,
        model: str | Path,
        adapters: Mapping[str, str | Path] | None = None,
        *,
        config: EngineConfig | None = None,
        chat_template: str | None = None,
        **overrides: Any,
    ) -> None:
        config = dataclasses.replace(config or EngineConfig(), **overrides)
        self._start(load_model(model, config, chat_template), config, adapters)

    @classmethod
    def from_loaded(
        cls,
        loaded: LoadedModel,
        adapters: Mapping[str, str | Path] | None = None,
        *,
        config: EngineConfig | None = None,
    ) -> LLM:
        """An engine over a model that is in memory already (see `polylens.models.loading.prepare_model`)."""
        llm = cls.__new__(cls)
        llm._start(loaded, config or EngineConfig(), adapters)
        return llm

    def _start(self, loaded: LoadedModel, config: EngineConfig, adapters: Mapping[str, str | Path] | None) -> None:
        self.config = config
        self.engine = Engine(loaded, config)
        self._outputs: dict[str, list[StepOutput]] = {}
        self._unloading: list[Unloaded] = []
        self._closed = False
        if not isinstance(adapters, Mapping | None):
            raise AdapterError(f"adapters must be a dict of name to path, got {adapters!r:.200}")
        for name, path in (adapters or {}).items():
            self.load_adapter(name, path)

    @property
    def loaded(self) -> LoadedModel:
        return self.engine.loaded

    @property
    def registry(self) -> AdapterStore:
        return self.engine.registry

    @property
    def adapters(self) -> list[str]:
        """Names of the loaded adapters."""
        return list(self.registry.names())

    def load_adapter(self, name: str, path: str | Path, *, replace: bool = False) -> LoadReport:
        """Load a PEFT LoRA under `name`.

        The same name and content again changes nothing. Other content is refused (AdapterConflictError)
        unless `replace`, and then counts for requests that start later; running ones keep the old one.
        """
        return self.engine.load_adapter(name, path, replace=replace)

    def combine_adapters(self, name: str, weights: Mapping[str, float], *, replace: bool = False) -> LoadReport:
        """Have the weighted sum of loaded adapters under `name`: `{"a": 0.7, "b": 0.3}`.

        As PEFT's `add_weighted_adapter(combination_type="cat")`, and exact. Made from the adapters' files as they
        are now; what happens to `a` and `b` later does not change it. Raises UnknownAdapterError, AdapterError.
        """
        named = Combination.of(weights).parts
        combination = Combination.joined([(self.registry.path(part), weight) for part, weight in named])
        return self.engine.load_adapter(name, combination, replace=replace)

    def unload_adapter(self, name: str) -> int:
        """Forget an adapter, and free its memory and what the caches keep of it.

        Returns the bytes freed: 0 while requests (streams that are not read to their end) still use it, as all is
        freed when the last of them ends. Raises UnknownAdapterError.
        """
        self._unloading.append(self.registry.unload(name))
        return self._free_unloaded()

    def _free_unloaded(self) -> int:
        """Drop what the caches have of unloaded adapters that no request uses any more; returns the bytes freed."""
        ended = [unloaded for unloaded in self._unloading if unloaded.released.done()]
        self._unloading = [unloaded for unloaded in self._unloading if unloaded not in ended]
        freed = sum(unloaded.released.result() for unloaded in ended)
        return freed + sum(self.engine.forget_adapter(one.adapter) for one in ended if one.adapter is not None)

    def processing(self, adapter: str | None = None) -> Processing:
        """How requests of `adapter` (None: the base model) become tokens and pixels.

        Raises UnknownAdapterError, AdapterError.
        """
        return processing_of(self.loaded, None if adapter is None else self.registry.get(adapter))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        adapter: str | None = None,
        sampling: SamplingParams | None = None,
    ) -> Completion:
        """Answer one conversation. Raises RequestError (or UnknownAdapterError) for a request that is wrong."""
        answer = self.generate([ChatRequest(messages, adapter, sampling or SamplingParams())])[0]
        assert isinstance(answer, Completion)
        return answer

    def generate(
        self,
        requests: Sequence[Request],
        *,
        on_error: Literal["raise", "return"] = "raise",
        progress: bool = False,
    ) -> list[Completion | PolylensError]:
        """Answer many requests in one mixed, continuous batch; answers come in the order of the requests.

        on_error: "raise" ends everything at the first wrong request; "return" puts its error in its place.
        """
        if isinstance(requests, str) or not isinstance(requests, Sequence):
            raise RequestError(f"requests must be a list of requests, got {requests!r:.200}")
        if on_error not in ("raise", "return"):
            raise RequestError(f"on_error must be 'raise' or 'return', got {on_error!r:.200}")
        answers: dict[str, Completion | PolylensError] = {}
        order: list[str | PolylensError] = []
        with self._own_requests() as own, progress_bar(len(requests), progress) as advance:
            for request in requests:
                try:
                    order.append(own.add(request))
                except PolylensError as error:
                    if on_error == "raise":
                        raise
                    order.append(error)
                    advance()
            while own.unfinished():
                for output in own.step():
                    if output.error is not None and on_error == "raise":
                        raise output.error
                    ended = output.error or (output.delta and output.delta.completion)
                    if ended:
                        answers[output.request_id] = ended
                        advance()
        return [answers[entry] if isinstance(entry, str) else entry for entry in order]

    def stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        adapter: str | None = None,
        sampling: SamplingParams | None = None,
    ) -> Iterator[CompletionDelta]:
        """Answer one conversation piece by piece; the last piece carries the whole `Completion`.

        Closing the iterator early aborts the request.
        """
        with self._own_requests() as own:
            own.add(ChatRequest(messages, adapter, sampling or SamplingParams()))
            while own.unfinished():
                for output in own.step():
                    if output.error is not None:
                        raise output.error
                    if output.delta is not None:
                        yield output.delta

    def check_integrity(self) -> None:
        """Raise if pages, leases or caches are not what the running requests explain (none after `generate`)."""
        self.engine.check_integrity()

    def close(self) -> None:
        """Abort what runs and restore the wrapped layers; the LLM cannot be used afterwards."""
        self._closed = True
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def _own_requests(self) -> Iterator[_OwnRequests]:
        """Whatever ends the block, none of its requests stays behind in the engine."""
        if self._closed:  # the layers are the model's own again: an adapter would be named and not applied
            raise ShuttingDownError("this LLM is closed; make a new one")
        own = _OwnRequests(self.engine, self._outputs)
        try:
            yield own
        finally:
            own.end()
            self._free_unloaded()


class _OwnRequests:
    """The requests of one call among those of others: two streams may be read in turns, or a chat between pieces.

    Every step serves all of them; what it gives for the others is kept in `outputs` until they ask.
    """

    def __init__(self, engine: Engine, outputs: dict[str, list[StepOutput]]) -> None:
        self._engine = engine
        self._outputs = outputs
        self._added: list[str] = []
        self._running: set[str] = set()

    def add(self, request: Request) -> str:
        if not isinstance(request, ChatRequest | TextRequest):
            raise RequestError(f"a request must be a ChatRequest or a TextRequest, got {request!r:.200}")
        request_id = self._engine.add_request(request)
        self._added.append(request_id)
        self._running.add(request_id)
        self._outputs[request_id] = []
        return request_id

    def unfinished(self) -> bool:
        return bool(self._running)

    def step(self) -> Iterator[StepOutput]:
        """What came for these requests; steps the engine if nothing has come yet."""
        if not any(self._outputs[request_id] for request_id in self._running):
            if not self._engine.has_unfinished():
                raise AbortedError("the LLM was closed before the answer was complete")
            for output in self._engine.step():
                if output.request_id in self._outputs:
                    self._outputs[output.request_id].append(output)
        for request_id in tuple(self._running):
            kept = self._outputs[request_id]
            while kept:
                output = kept.pop(0)
                if output.error is not None or (output.delta and output.delta.completion):
                    self._running.discard(request_id)
                yield output

    def end(self) -> None:
        for request_id in self._added:
            self._engine.abort(request_id)
            del self._outputs[request_id]
