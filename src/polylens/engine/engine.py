"""The engine: requests join, steps run, tokens come out. One step reads like `Engine.step`."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from polylens.core import Completion, CompletionDelta, FinishReason, LayerKind, Usage
from polylens.engine.adaptable import Adaptable
from polylens.engine.adapter_files import AdapterFiles
from polylens.engine.adapter_store import AdapterStore
from polylens.engine.host import HostExecutor
from polylens.engine.kv import MeasuredText
from polylens.engine.logit_rules import LogitRules
from polylens.engine.measure import make_plan
from polylens.engine.paged import PagedExecutor
from polylens.engine.pages import PageAllocator
from polylens.engine.prefix_cache import PrefixCache
from polylens.engine.prepare import PreparedRequest, RequestToolbox, prepare_request
from polylens.engine.prove import settled
from polylens.engine.sampler import Sampled, Sampler, make_generator
from polylens.engine.scheduler import Scheduler
from polylens.engine.sequence import Sequence
from polylens.engine.step_plan import StepPlan
from polylens.engine.vision import VisionCache, VisionStage, encoder_rows
from polylens.errors import InternalError, PolylensError, RequestError
from polylens.lora.context import RoutingContext
from polylens.lora.cost import CostModel, kept_calibration
from polylens.lora.kernels import choose_factored
from polylens.lora.layers import WrappedLayers, wrap_layers
from polylens.lora.linear import make_linears_fast
from polylens.models.probe_model import find_row_rules
from polylens.models.row_rules import RowRule
from polylens.native import compiled_kernels

if TYPE_CHECKING:
    from polylens.adapters.load import AdapterPath, LoadReport
    from polylens.config import EngineConfig
    from polylens.core import Adapter, Request, TokenLogprob
    from polylens.engine.adapter_lease import StoreLease
    from polylens.engine.executor import Executor
    from polylens.engine.plan import MemoryPlan
    from polylens.engine.stopping import OutputStep, OutputStream
    from polylens.models.loading import LoadedModel
    from polylens.models.prepared import PreparedPrompt
    from polylens.models.probe import ProbeResult
    from polylens.native import Kernels


ADAPTER_WAIT_S = 0.01
"""A step that has nothing to do but to wait for adapters waits so long at most: aborts and new requests come next."""


@dataclass(frozen=True)
class StepOutput:
    """What a step did for one request: a piece of its answer, or the error that ended it."""

    request_id: str
    delta: CompletionDelta | None = None
    error: PolylensError | None = None


@dataclass(eq=False)
class _Request:
    """A running request: its sequence, and its answer so far."""

    request: Request
    seq: Sequence
    stream: OutputStream
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


class Engine:
    """Runs one loaded model for many requests at once, each with its own adapter or none."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, plan: MemoryPlan | None = None) -> None:
        """plan: how memory is divided; None: as measured."""
        self.loaded = loaded = settled(loaded)
        self.config = config
        self.context = RoutingContext(head_layer=loaded.head_name)
        """Whose rows the layers compute, in the forward that runs now."""
        self._kernels = _kernels(loaded, config)
        make_linears_fast(loaded.model, self._kernels)
        text = None if loaded.is_hosted else MeasuredText.of(loaded)
        self.plan = plan or make_plan(loaded, text, self.context, config)
        self._adapter_files = AdapterFiles(loaded, config)
        self.registry = self._adapter_store()
        self._requests: dict[str, _Request] = {}
        self._ids = itertools.count()
        self.num_steps = 0
        self.num_generated_tokens = 0
        self.vision = VisionStage(
            loaded, self.context, VisionCache(self.plan.vision_cache_bytes), self.plan.max_encoder_rows
        )
        self._executor = self._executor_for(text)
        self.max_running = self._executor.limits.max_running
        self.state_bytes = self._executor.limits.state_bytes
        self._allocator = PageAllocator(self._executor.limits.num_pages)
        self.prefix_cache = self._prefix_cache()
        self.scheduler = self._scheduler()
        self._wrapped: WrappedLayers | None = None
        self.probe: ProbeResult | None = None
        self._sampler = Sampler()
        self._toolbox = RequestToolbox(loaded)

    def _adapter_store(self) -> AdapterStore:
        return AdapterStore(
            self._adapter_files.read,
            self._adapter_files.place,
            device_bytes=self.plan.adapter_bytes,
            host_bytes=self.config.adapter_host_bytes,
            shared_memory=self._adapter_files.on_cpu,
        )

    def _executor_for(self, text: MeasuredText | None) -> Executor:
        """text: None where transformers generates."""
        if text is None:
            return HostExecutor(self.loaded, self.config, self.context)
        return PagedExecutor(
            self.loaded, text, self.config, self.context, self.vision, self.plan.kv_bytes, self._kernels
        )

    def _prefix_cache(self) -> PrefixCache | None:
        limits = self._executor.limits
        if not limits.shares_pages:
            return None
        needs_connector = self.loaded.notes.embed is not None
        return PrefixCache(limits.page_tokens, self._allocator, text_needs_connector=needs_connector)

    def _scheduler(self) -> Scheduler:
        limits = self._executor.limits
        return Scheduler(
            page_tokens=limits.page_tokens,
            max_step_tokens=limits.max_step_tokens,
            max_running=limits.max_running,
            allocator=self._allocator,
            prefix_cache=self.prefix_cache,
            gate=self.registry,
        )

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt plus answer: the model's context, or what all KV pages hold together if that is less.

        So an answer ends where the pages do; it is not refused for what it might have needed.
        """
        # The last token is never computed and needs no place.
        return min(self.loaded.max_model_len, self._allocator.num_pages * self._executor.limits.page_tokens + 1)

    # ---- adapters

    def load_adapter(self, name: str, path: AdapterPath, *, replace: bool = False) -> LoadReport:
        """Load an adapter; the first one also makes the engine ready for adapters (see `prepare_for_adapters`)."""
        self.prepare_for_adapters()
        return self.registry.load(name, path, replace=replace)

    def forget_adapter(self, adapter: Adapter) -> int:
        """Drop what the caches have of an adapter that is gone, unless another one has the same content there.

        Returns the bytes freed; KV pages become free, but their storage stays. Between steps only.
        """
        vision, language = self.registry.digests_in_use()
        if self.prefix_cache is not None and adapter.language_digest not in {"", *language}:
            self.prefix_cache.forget(adapter.language_digest)
        if adapter.vision_digest in {"", *vision}:
            return 0
        return self.vision.cache.forget(adapter.vision_digest)

    def prepare_for_adapters(self) -> None:
        """Find out the encoder's row rules and wrap the layers. Done once; a base model alone needs neither."""
        if self._wrapped is not None:
            return
        probe = find_row_rules(self.loaded)
        layers = self.loaded.layers
        adaptable = Adaptable.of(layers, probe)
        others = {**layers.other_modules, **adaptable.refused}
        self._adapter_files.describe_model(
            dataclasses.replace(layers, specs=adaptable.specs, other_modules=others),
            no_effect=probe.layers_with(RowRule.NO_EFFECT),
        )
        self.vision.mixed = adaptable.mixed
        self._wrapped = wrap_layers(
            self.loaded.model,
            adaptable.specs.values(),
            self.context,
            probe.rules,
            self._cost_model(),
            choose_factored(self.loaded.device, self._kernels),
        )
        self.probe = probe
        if any(spec.kind is LayerKind.HEAD_NORM for spec in adaptable.specs.values()):
            self._executor.rehearse(1 + _most_heads(self.loaded))

    def _cost_model(self) -> CostModel:
        mode = self.config.apply_mode
        if mode != "auto" or not self.config.calibrate:
            return CostModel(mode)
        return CostModel(mode, kept_calibration(self.loaded.device, self.loaded.dtype))

    # ---- requests

    def add_request(self, request: Request) -> str:
        """Queue a request; returns its id. Raises RequestError or UnknownAdapterError, and then nothing is queued."""
        lease = self.registry.lease(request.adapter)
        try:
            lease.read()
            return self.enqueue(self.prepare(request, adapter=lease.adapter), lease)
        except BaseException:
            lease.release()
            raise

    def prepare(self, request: Request, *, adapter: Adapter | None, allow_paths: bool = True) -> PreparedRequest:
        """The slow part of adding a request, done before it meets the engine's state: any thread may call this.

        adapter: the one it will be queued with. allow_paths: whether media may name local files. Raises RequestError.
        """
        prepared = prepare_request(
            self.loaded, self._toolbox, request, adapter, max_model_len=self.max_model_len, allow_paths=allow_paths
        )
        self._check_item_sizes(prepared.prompt)
        return prepared

    def _check_item_sizes(self, prompt: PreparedPrompt) -> None:
        for item in prompt.items:
            rows = encoder_rows(self.loaded, item)
            if rows > self.plan.max_item_rows:
                raise RequestError(
                    f"{item.kind} too large: it takes {rows} rows of the encoder, and the memory plan has room for "
                    f"{self.plan.max_item_rows}; send it smaller, or start with more memory (see `polylens plan`)",
                    param="messages",
                )

    def enqueue(self, prepared: PreparedRequest, lease: StoreLease, request_id: str | None = None) -> str:
        """Queue a prepared request under the adapter of `lease`; returns its id. Between steps only.

        The lease is the request's from here on and released when it ends; when this raises
        (PromptTooLongError), it stays the caller's.
        """
        request_id = request_id or prepared.request.request_id or f"request-{next(self._ids)}"
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")
        seq = Sequence(
            request_id=request_id,
            adapter=lease.adapter,
            prompt_ids=prepared.prompt.token_ids,
            sampling=prepared.sampling,
            lease=lease,
            cache_salt=prepared.request.cache_salt or "",
            positions=prepared.positions,
            position_delta=prepared.position_delta,
            generator=make_generator(prepared.sampling),
            logit_rules=LogitRules.start(
                prepared.sampling,
                prepared.prompt.token_ids,
                prepared.constraint.copy() if prepared.constraint is not None else None,
            ),
        )
        self.scheduler.add(seq)
        self._executor.start(seq, prepared.prompt)
        self._requests[request_id] = _Request(prepared.request, seq, prepared.rules.start(prepared.sampling))
        return request_id

    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished()

    def abort(self, request_id: str) -> None:
        """End a request and free what it holds; one that has ended already is left alone."""
        running = self._requests.pop(request_id, None)
        if running is not None:
            self._release(running)

    # ---- steps

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Plan, prepare (encode the pictures the plan needs), run the model, sample, and pass on what is new."""
        outputs = self._end_without_adapter()
        plan = self.scheduler.schedule()
        if not plan.entries and self.has_unfinished():
            self.registry.wait(ADAPTER_WAIT_S)
        self.num_steps += 1
        failed = self._executor.prepare(plan.entries)
        outputs += [self._fail(request_id, error) for request_id, error in failed.items()]
        entries = [entry for entry in plan.entries if entry.seq.request_id not in failed]
        if entries:
            logits_sv = self._executor.run(entries)
            self.scheduler.on_computed(StepPlan(tuple(entries)))
            outputs += self._sample([entry.seq for entry in entries if entry.samples], logits_sv)
        return outputs

    def _end_without_adapter(self) -> list[StepOutput]:
        """End the requests whose adapter could not be brought in."""
        failures = self.registry.take_failures()
        failed = [(seq.request_id, failures[seq.adapter]) for seq in self.scheduler.waiting if seq.adapter in failures]
        return [self._fail(request_id, error) for request_id, error in failed]

    def _sample(self, sequences: list[Sequence], logits_sv: torch.Tensor) -> list[StepOutput]:
        sampled = self._sampler.sample(
            logits_sv,
            [seq.sampling for seq in sequences],
            [seq.generator for seq in sequences],
            [seq.logit_rules for seq in sequences],
        )
        return [
            self._fail(seq.request_id, token)
            if isinstance(token, PolylensError)
            else self._advance(self._requests[seq.request_id], token, logits_v)
            for seq, token, logits_v in zip(sequences, sampled, logits_sv, strict=True)
        ]

    def _advance(self, running: _Request, sampled: Sampled, logits_v: torch.Tensor) -> StepOutput:
        """Take in one new token."""
        running.seq.append(sampled.token_id)
        self.num_generated_tokens += 1
        if sampled.logprob is not None:
            running.logprobs.append(sampled.logprob)
        if running.seq.sampling.return_logits:
            own_v = logits_v[: self.loaded.vocab_size + _num_more_tokens(running.seq.adapter)]
            running.logits.append(own_v.cpu().clone())
        step = running.stream.push(sampled.token_id)
        if running.seq.logit_rules is not None and running.seq.logit_rules.ended:
            step = running.stream.complete(step)
        running.text.append(step.text)
        completion = None
        if step.finish_reason is not None:
            completion = self._completion(running, step)
            del self._requests[running.seq.request_id]
            self._release(running)
        logprobs = None if sampled.logprob is None else (sampled.logprob,)
        delta = CompletionDelta(step.text, (sampled.token_id,), completion, logprobs)
        return StepOutput(running.seq.request_id, delta)

    def _completion(self, running: _Request, step: OutputStep) -> Completion:
        seq, sampling = running.seq, running.seq.sampling
        return Completion(
            text="".join(running.text),
            token_ids=tuple(seq.output_ids),
            finish_reason=step.finish_reason or FinishReason.STOP,
            usage=Usage(seq.num_prompt_tokens, len(seq.output_ids), seq.cached_tokens),
            adapter=running.request.adapter,
            request_id=seq.request_id,
            logprobs=tuple(running.logprobs) if sampling.logprobs is not None else None,
            logits=tuple(running.logits) if sampling.return_logits else None,
            matched_stop=step.matched_stop,
        )

    def _fail(self, request_id: str, error: PolylensError) -> StepOutput:
        self.abort(request_id)
        return StepOutput(request_id, error=error)

    def _release(self, running: _Request) -> None:
        self.scheduler.abort(running.seq)
        self._executor.end(running.seq)
        if running.seq.lease is not None:
            running.seq.lease.release()

    # ---- upkeep

    def check_integrity(self) -> None:
        """Raise unless scheduler, pages, caches and leases agree with the running requests."""
        self.scheduler.check_integrity()
        self.vision.cache.check_integrity()
        self.registry.check_integrity()
        unfinished = {seq.request_id for seq in (*self.scheduler.running, *self.scheduler.waiting)}
        if unfinished != self._requests.keys():
            raise InternalError(f"requests {sorted(self._requests)} but sequences {sorted(unfinished)}")

    def close(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)
        self.registry.close()
        if self._wrapped is not None:
            self._wrapped.unwrap()


def _kernels(loaded: LoadedModel, config: EngineConfig) -> Kernels | None:
    """The compiled kernels where they serve: on a CPU, in float32."""
    serve = loaded.device.type == "cpu" and loaded.dtype is torch.float32
    return compiled_kernels() if serve and config.compile_kernels else None


def _num_more_tokens(adapter: Adapter | None) -> int:
    return 0 if adapter is None else adapter.num_more_tokens


def _most_heads(loaded: LoadedModel) -> int:
    """So many more tokens than that can be told from heads."""
    text = loaded.config.get_text_config()
    # Layers may differ in it (Gemma 4), and then only their own configs tell.
    layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
    names = ("num_attention_heads", "num_key_value_heads")
    return max(getattr(layer, name, None) or 0 for layer in layers for name in names)
