"""The engine: requests join, steps run, tokens come out. One step reads like `Engine.step`."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from polylens.adapters.registry import AdapterRegistry
from polylens.core import Completion, CompletionDelta, FinishReason, Usage
from polylens.engine.kv import PagedKV, bytes_per_token, measure_kv
from polylens.engine.pages import PageAllocator, pages_for
from polylens.engine.prefix_cache import PrefixCache
from polylens.engine.runner import Runner
from polylens.engine.sampler import Sampled, Sampler, make_generator
from polylens.engine.scheduler import Scheduler, StepPlan
from polylens.engine.sequence import MediaSpan, Sequence
from polylens.engine.stopping import OutputRules
from polylens.engine.vision import EncodeJob, VisionCache, VisionStage
from polylens.errors import InternalError, ModelLoadError, PolylensError, PromptTooLongError
from polylens.lora.context import RoutingContext
from polylens.lora.cost import CostModel
from polylens.lora.layers import WrappedLayers, wrap_layers
from polylens.models.positions import prompt_positions
from polylens.models.probe_model import find_row_rules
from polylens.models.row_rules import RowRule
from polylens.models.text import TextRunner

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from polylens.adapters.load import LoadReport
    from polylens.adapters.registry import AdapterLease
    from polylens.config import EngineConfig
    from polylens.core import ChatRequest, TokenLogprob
    from polylens.engine.scheduler import StepEntry
    from polylens.engine.stopping import OutputStep, OutputStream
    from polylens.models.encoder import ItemFeatures
    from polylens.models.loading import LoadedModel
    from polylens.models.probe import ProbeResult
    from polylens.models.processing import PreparedPrompt


@dataclass(frozen=True)
class StepOutput:
    """What a step did for one request: a piece of its answer, or the error that ended it."""

    request_id: str
    delta: CompletionDelta | None = None
    error: PolylensError | None = None


@dataclass(eq=False)
class _Request:
    """A running request: its sequence, its pictures, and its answer so far."""

    request: ChatRequest
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
        self.registry = AdapterRegistry(loaded.layers, dtype=loaded.dtype, device=loaded.device)
        self._requests: dict[str, _Request] = {}
        self._ids = itertools.count()
        text = TextRunner(loaded)
        with torch.inference_mode():
            layers = measure_kv(text, _position_rows(loaded))
        num_pages = _num_pages(config, loaded, bytes_per_token(layers, loaded.dtype))
        kv = PagedKV(
            layers, num_pages=num_pages, page_tokens=config.page_tokens, dtype=loaded.dtype, device=loaded.device
        )
        self._allocator = PageAllocator(num_pages)
        self.prefix_cache = PrefixCache(config.page_tokens, self._allocator) if config.prefix_cache else None
        self.scheduler = Scheduler(
            page_tokens=config.page_tokens,
            max_step_tokens=config.max_step_tokens,
            max_running=config.max_running,
            allocator=self._allocator,
            prefix_cache=self.prefix_cache,
        )
        self._context = RoutingContext(head_layer=loaded.head_name)
        self._wrapped: WrappedLayers | None = None
        self.probe: ProbeResult | None = None
        self.vision = VisionStage(
            loaded, self._context, VisionCache(config.vision_cache_bytes), config.max_encoder_rows
        )
        self._runner = Runner(text, kv, self._context)
        self._sampler = Sampler()
        self._rules = OutputRules(loaded.processing.tokenizer, loaded.processing.stop_token_ids)

    # ---- adapters

    def load_adapter(self, name: str, path: str | Path, *, replace: bool = False) -> LoadReport:
        """Load an adapter; the first one also makes the engine ready for adapters (see `prepare_for_adapters`)."""
        self.prepare_for_adapters()
        return self.registry.load(name, path, replace=replace)

    def prepare_for_adapters(self) -> None:
        """Find out the encoder's row rules and wrap the layers. Done once; a base model alone needs neither."""
        if self._wrapped is not None:
            return
        probe = find_row_rules(self.loaded)
        layers = self.loaded.layers
        reachable = {name: spec for name, spec in layers.specs.items() if name not in probe.unreachable}
        others = {**layers.other_modules, **dict.fromkeys(probe.unreachable, "a layer that is never called")}
        self.registry.describe_model(
            dataclasses.replace(layers, specs=reachable, other_modules=others),
            no_effect=probe.layers_with(RowRule.NO_EFFECT),
        )
        self.vision.mixed = probe.mixed
        self._wrapped = wrap_layers(
            self.loaded.model, reachable.values(), self._context, probe.rules, CostModel(self.config.apply_mode)
        )
        self.probe = probe

    # ---- requests

    def add_request(self, request: ChatRequest) -> str:
        """Queue a request; returns its id. Raises RequestError or UnknownAdapterError, and then nothing is queued."""
        lease = self.registry.lease(request.adapter)
        try:
            running = self._prepare(request, lease)
            self.scheduler.add(running.seq)
        except BaseException:
            lease.release()
            raise
        self._requests[running.seq.request_id] = running
        return running.seq.request_id

    def _prepare(self, request: ChatRequest, lease: AdapterLease) -> _Request:
        prompt = self.loaded.processing.prepare(request.messages)
        num_prompt, limit = len(prompt.token_ids), self.loaded.max_model_len
        if num_prompt >= limit:
            raise PromptTooLongError(
                f"the prompt has {num_prompt} tokens; the model's context of {limit} leaves no room for an answer",
                param="messages",
            )
        # The answer ends, at the latest, where the context does.
        sampling = dataclasses.replace(
            request.sampling, max_tokens=min(request.sampling.max_tokens, limit - num_prompt)
        )
        jobs = [EncodeJob.of(item, lease.adapter) for item in prompt.items]
        positions, delta = prompt_positions(self.loaded.inner, prompt)
        seq = Sequence(
            request_id=request.request_id or f"request-{next(self._ids)}",
            adapter=lease.adapter,
            prompt_ids=prompt.token_ids,
            sampling=sampling,
            lease=lease,
            media=_media_spans(prompt, jobs),
            bidirectional_spans=self._bidirectional_spans(prompt),
            positions=positions,
            position_delta=delta,
            generator=make_generator(sampling),
        )
        if seq.request_id in self._requests:
            raise InternalError(f"request id {seq.request_id!r} is in use")
        return _Request(request, seq, {job.key: job for job in jobs}, self._rules.start(sampling))

    def _bidirectional_spans(self, prompt: PreparedPrompt) -> tuple[tuple[int, int], ...]:
        if not self.loaded.notes.bidirectional_images:
            return ()
        return tuple(sorted((start, start + n) for slot in prompt.slots for start, n in slot.positions))

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
        plan = self.scheduler.schedule()
        outputs = self._encode_media(plan)
        entries = [entry for entry in plan.entries if entry.seq.request_id in self._requests]
        if entries:
            logits_sv = self._runner.run(entries, self._features(entries))
            self.scheduler.on_computed(StepPlan(tuple(entries)))
            outputs += self._sample([entry.seq for entry in entries if entry.samples], logits_sv)
            self._drop_features(entries)
        return outputs

    def _encode_media(self, plan: StepPlan) -> list[StepOutput]:
        """Get the features the plan's chunks need; requests whose pictures fail end with the error."""
        wanted: dict[str, EncodeJob] = {}
        needs: list[tuple[_Request, str]] = []
        for entry in plan.entries:
            running = self._requests[entry.seq.request_id]
            for key in {span.vision_key for span in entry.media} - running.features.keys():
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
            logits_sv, [seq.sampling for seq in sequences], [seq.generator for seq in sequences]
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
        if sampled.logprob is not None:
            running.logprobs.append(sampled.logprob)
        if running.seq.sampling.return_logits:
            running.logits.append(logits_v.cpu().clone())
        step = running.stream.push(sampled.token_id)
        running.text.append(step.text)
        completion = None
        if step.finish_reason is not None:
            completion = self._completion(running, step)
            del self._requests[running.seq.request_id]
            self._release(running)
        return StepOutput(running.seq.request_id, CompletionDelta(step.text, (sampled.token_id,), completion))

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
        unfinished = {seq.request_id for seq in (*self.scheduler.running, *self.scheduler.waiting)}
        if unfinished != self._requests.keys():
            raise InternalError(f"requests {sorted(self._requests)} but sequences {sorted(unfinished)}")

    def close(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)
        if self._wrapped is not None:
            self._wrapped.unwrap()


def _position_rows(loaded: LoadedModel) -> int:
    return 3 if hasattr(loaded.inner, "get_rope_index") else 1


def _num_pages(config: EngineConfig, loaded: LoadedModel, token_bytes: int) -> int:
    """KV pages within the byte budget, but no more than the running sequences could ever fill."""
    affordable = config.kv_bytes // (token_bytes * config.page_tokens)
    if affordable < 1:
        raise ModelLoadError(
            f"kv_bytes={config.kv_bytes} holds no KV page: one page of {config.page_tokens} tokens needs "
            f"{token_bytes * config.page_tokens} bytes"
        )
    usable = config.max_running * pages_for(loaded.max_model_len, config.page_tokens)
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
