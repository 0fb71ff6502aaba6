"""The engine: requests join, steps run, tokens come out. One step reads like `Engine.step`."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from polylens.core import Completion, CompletionDelta, Component, FinishReason, LayerKind, Usage
from polylens.engine.adapter_files import AdapterFiles
from polylens.engine.adapter_store import AdapterStore
from polylens.engine.constraints import Constraints
from polylens.engine.kv import PagedKV, bytes_per_token, measure_kv
from polylens.engine.logit_rules import LogitRules
from polylens.engine.pages import PageAllocator, pages_for
from polylens.engine.prefix_cache import PrefixCache
from polylens.engine.prepare import PreparedRequest, prepare_request
from polylens.engine.runner import Runner
from polylens.engine.sampler import Sampled, Sampler, make_generator
from polylens.engine.scheduler import Scheduler, StepPlan
from polylens.engine.sequence import MediaSpan, Sequence
from polylens.engine.stopping import OutputRules
from polylens.engine.vision import EncodeJob, VisionCache, VisionStage
from polylens.errors import InternalError, ModelLoadError, PolylensError, RequestError
from polylens.lora.context import RoutingContext
from polylens.lora.cost import CostModel
from polylens.lora.layers import WrappedLayers, wrap_layers
from polylens.models.positions import position_rows, two_way_spans
from polylens.models.probe_model import find_row_rules
from polylens.models.row_rules import RowRule
from polylens.models.text import TextRunner

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from polylens.adapters.load import AdapterPath, LoadReport
    from polylens.config import EngineConfig
    from polylens.core import Adapter, LayerSpec, Request, TokenLogprob
    from polylens.engine.adapter_store import StoreLease
    from polylens.engine.scheduler import StepEntry
    from polylens.engine.stopping import OutputStep, OutputStream
    from polylens.models.encoder import ItemFeatures
    from polylens.models.loading import LoadedModel
    from polylens.models.probe import ProbeResult
    from polylens.models.processing import PreparedPrompt


ADAPTER_WAIT_S = 0.01
"""A step that has nothing to do but to wait for adapters waits so long at most: aborts and new requests come next."""

MAX_STATE_SHARE = 0.5
"""Part of `kv_bytes` that states which layers carry from token to token (Qwen3.5, LFM2) may take: they are as large
for a short answer as for a long one, and must leave room for the pages of long ones."""


@dataclass(frozen=True)
class StepOutput:
    """What a step did for one request: a piece of its answer, or the error that ended it."""

    request_id: str
    delta: CompletionDelta | None = None
    error: PolylensError | None = None


@dataclass(eq=False)
class _Request:
    """A running request: its sequence, its pictures, and its answer so far."""

    request: Request
    seq: Sequence
    jobs: Mapping[str, EncodeJob]
    stream: OutputStream
    features: dict[str, ItemFeatures] = field(default_factory=dict)
    """Features by vision key, held from the first chunk that needs them to the end of the prefill."""
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


class Engine:
    """Runs one loaded model for many requests at once, each with its own adapter or none."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self.loaded = loaded
        self.config = config
        self._adapter_files = AdapterFiles(loaded.dtype, loaded.device)
        self.registry = AdapterStore(
            self._adapter_files.read,
            self._adapter_files.place,
            device_bytes=config.adapter_device_bytes,
            host_bytes=config.adapter_host_bytes,
            shared_memory=self._adapter_files.on_cpu,
        )
        self._requests: dict[str, _Request] = {}
        self._ids = itertools.count()
        self.num_steps = 0
        self.num_generated_tokens = 0
        text = TextRunner(loaded)
        with torch.inference_mode():
            layers, self.state_bytes = measure_kv(text, position_rows(loaded.inner))
        self.max_running = _max_running(config, self.state_bytes)
        num_pages = _num_pages(
            config, loaded, bytes_per_token(layers, loaded.dtype), self.max_running, self.state_bytes
        )
        kv = PagedKV(
            layers, num_pages=num_pages, page_tokens=config.page_tokens, dtype=loaded.dtype, device=loaded.device
        )
        self._allocator = PageAllocator(num_pages)
        # Pages hold no state: a sequence whose layers carry one cannot begin in the middle.
        cached = config.prefix_cache and not text.carries_state
        self.prefix_cache = PrefixCache(config.page_tokens, self._allocator) if cached else None
        self.scheduler = Scheduler(
            page_tokens=config.page_tokens,
            max_step_tokens=config.max_step_tokens,
            max_running=self.max_running,
            allocator=self._allocator,
            prefix_cache=self.prefix_cache,
            gate=self.registry,
        )
        self._context = RoutingContext(head_layer=loaded.head_name)
        self._wrapped: WrappedLayers | None = None
        self.probe: ProbeResult | None = None
        self.vision = VisionStage(
            loaded, self._context, VisionCache(config.vision_cache_bytes), config.max_encoder_rows
        )
        self._runner = Runner(text, kv, self._context)
        self._sampler = Sampler()
        self._constraints = Constraints(
            loaded.processing.tokenizer, loaded.vocab_size, loaded.processing.stop_token_ids
        )
        self._rules = OutputRules(loaded.processing.tokenizer, loaded.processing.stop_token_ids)

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
        reachable = {name: spec for name, spec in layers.specs.items() if name not in probe.unreachable}
        reachable, undivided = _without_undivided(reachable, probe)
        others = {
            **layers.other_modules,
            **dict.fromkeys(probe.unreachable, "a layer that is never called"),
            **dict.fromkeys(undivided, "a module whose rows cannot be told apart by item"),
        }
        self._adapter_files.describe_model(
            dataclasses.replace(layers, specs=reachable, other_modules=others),
            no_effect=probe.layers_with(RowRule.NO_EFFECT),
        )
        self.vision.mixed = not any(
            probe.rules.get(name) is RowRule.UNPROVEN and spec.component is not Component.LANGUAGE_MODEL
            for name, spec in reachable.items()
        )
        self._wrapped = wrap_layers(
            self.loaded.model, reachable.values(), self._context, probe.rules, CostModel(self.config.apply_mode)
        )
        self.probe = probe

    # ---- requests

    def add_request(self, request: Request) -> str:
        """Queue a request; returns its id. Raises RequestError or UnknownAdapterError, and then nothing is queued."""
        lease = self.registry.lease(request.adapter)
        try:
            lease.read()
            return self.enqueue(self.prepare(request), lease)
        except BaseException:
            lease.release()
            raise

    def prepare(self, request: Request, *, allow_paths: bool = True) -> PreparedRequest:
        """The slow part of adding a request, done before it meets the engine's state: any thread may call this.

        allow_paths: whether media may name local files. Raises RequestError.
        """
        return prepare_request(self.loaded, self._constraints, request, allow_paths=allow_paths)

    def enqueue(self, prepared: PreparedRequest, lease: StoreLease, request_id: str | None = None) -> str:
        """Queue a prepared request under the adapter of `lease`; returns its id. Between steps only.

        The lease is the request's from here on and released when it ends; when this raises
        (PromptTooLongError), it stays the caller's.
        """
        request_id = request_id or prepared.request.request_id or f"request-{next(self._ids)}"
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")
        salt = prepared.request.cache_salt or ""
        jobs = [EncodeJob.of(item, lease.adapter, salt) for item in prepared.prompt.items]
        seq = Sequence(
            request_id=request_id,
            adapter=lease.adapter,
            prompt_ids=prepared.prompt.token_ids,
            sampling=prepared.sampling,
            lease=lease,
            cache_salt=salt,
            media=_media_spans(prepared.prompt, jobs),
            bidirectional_spans=two_way_spans(self.loaded.notes.two_way, prepared.prompt),
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
        self._requests[request_id] = _Request(
            prepared.request, seq, {job.key: job for job in jobs}, self._rules.start(prepared.sampling)
        )
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
        """Plan, encode the pictures the plan needs, run the text model, sample, and pass on what is new."""
        outputs = self._end_without_adapter()
        plan = self.scheduler.schedule()
        if not plan.entries and self.has_unfinished():
            self.registry.wait(ADAPTER_WAIT_S)
        self.num_steps += 1
        outputs += self._encode_media(plan)
        entries = [entry for entry in plan.entries if entry.seq.request_id in self._requests]
        if entries:
            logits_sv = self._runner.run(entries, self._features(entries))
            self.scheduler.on_computed(StepPlan(tuple(entries)))
            outputs += self._sample([entry.seq for entry in entries if entry.samples], logits_sv)
            self._drop_features(entries)
        return outputs

    def _end_without_adapter(self) -> list[StepOutput]:
        """End the requests whose adapter could not be brought in."""
        failures = self.registry.take_failures()
        failed = [(seq.request_id, failures[seq.adapter]) for seq in self.scheduler.waiting if seq.adapter in failures]
        return [self._fail(request_id, error) for request_id, error in failed]

    def _encode_media(self, plan: StepPlan) -> list[StepOutput]:
        """Get the features the plan's chunks need; requests whose pictures fail end with the error."""
        wanted: dict[str, EncodeJob] = {}
        needs: list[tuple[_Request, str]] = []
        for entry in plan.entries:
            running = self._requests[entry.seq.request_id]
            # A dict, not a set: the order of items in an encoder batch must not differ from run to run.
            for key in dict.fromkeys(span.vision_key for span in entry.media):
                if key in running.features:
                    continue
                wanted[key] = running.jobs[key]
                needs.append((running, key))
        found = self.vision.encode(list(wanted.values()))
        failed: dict[str, PolylensError] = {}
        for running, key in needs:
            features = found[key]
            if isinstance(features, PolylensError):
                failed[running.seq.request_id] = features
            else:
                running.features[key] = features
        return [self._fail(request_id, error) for request_id, error in failed.items()]

    def _features(self, entries: Iterable[StepEntry]) -> dict[str, ItemFeatures]:
        return {
            span.vision_key: self._requests[entry.seq.request_id].features[span.vision_key]
            for entry in entries
            for span in entry.media
        }

    def _drop_features(self, entries: Iterable[StepEntry]) -> None:
        """After the prefill the features are the vision cache's to keep or to drop."""
        for entry in entries:
            running = self._requests.get(entry.seq.request_id)
            if running is not None and entry.samples:
                running.features.clear()

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
            running.logits.append(logits_v.cpu().clone())
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
        running.features.clear()
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


def _without_undivided(
    specs: Mapping[str, LayerSpec], probe: ProbeResult
) -> tuple[dict[str, LayerSpec], tuple[str, ...]]:
    """The layers without those norms and patch embeddings that have no proven row rule, and the names of these.

    Adapters seldom change them: so those adapters are refused, and the others still mix in the encoder.
    """
    undivided = tuple(
        name
        for name, spec in specs.items()
        if spec.kind in (LayerKind.NORM, LayerKind.CONV) and probe.rules.get(name) is RowRule.UNPROVEN
    )
    return {name: spec for name, spec in specs.items() if name not in undivided}, undivided


def _max_running(config: EngineConfig, state_bytes: int) -> int:
    """Sequences decoded together: no more than whose carried states fill their part of the KV budget."""
    if state_bytes == 0:
        return config.max_running
    affordable = int(config.kv_bytes * MAX_STATE_SHARE) // state_bytes
    if affordable < 1:
        raise ModelLoadError(
            f"kv_bytes={config.kv_bytes} is too small: a request of this model carries a state of {state_bytes} bytes; "
            f"give at least {int(state_bytes / MAX_STATE_SHARE)}"
        )
    return min(config.max_running, affordable)


def _num_pages(config: EngineConfig, loaded: LoadedModel, token_bytes: int, max_running: int, state_bytes: int) -> int:
    """KV pages within the byte budget left by states, but no more than the running sequences could ever fill."""
    affordable = (config.kv_bytes - max_running * state_bytes) // (token_bytes * config.page_tokens)
    if affordable < 1:
        raise ModelLoadError(
            f"kv_bytes={config.kv_bytes} holds no KV page: one page of {config.page_tokens} tokens needs "
            f"{token_bytes * config.page_tokens} bytes"
        )
    usable = max_running * pages_for(loaded.max_model_len, config.page_tokens)
    return min(affordable, usable)


def _media_spans(prompt: PreparedPrompt, jobs: list[EncodeJob]) -> tuple[MediaSpan, ...]:
    """The prompt's media runs with the offsets of their rows within their items, in prompt order."""
    spans = []
    for slot in prompt.slots:
        offset = 0
        for start, length in slot.positions:
            spans.append(MediaSpan(start, length, jobs[slot.item_index].key, slot.item_index, offset))
            offset += length
    return tuple(sorted(spans, key=lambda span: span.start))
