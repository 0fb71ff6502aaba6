"""The executor that mixes: many requests in one batch, keys and values in the engine's pages, features cached."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from polylens.engine.executor import Limits
from polylens.engine.kv import rehearse
from polylens.engine.pages import pages_for
from polylens.engine.plan import affordable_running
from polylens.engine.runner import Runner
from polylens.engine.sequence import MediaSpan
from polylens.engine.vision import EncodeJob, VisionStage
from polylens.errors import PolylensError
from polylens.lora.routing import segments
from polylens.models.positions import span_holes, two_way_spans

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from polylens.config import EngineConfig
    from polylens.engine import sequence
    from polylens.engine.kv import MeasuredText
    from polylens.engine.step_plan import StepEntry
    from polylens.lora.context import RoutingContext
    from polylens.models.features import ItemFeatures
    from polylens.models.loading import LoadedModel
    from polylens.models.prepared import PreparedPrompt
    from polylens.native import Kernels


@dataclass(eq=False)
class _Media:
    """A sequence's pictures by vision key.

    features: held from the first chunk that needs them to the end of the prefill; after it they are the vision
    cache's to keep or to drop.
    """

    jobs: Mapping[str, EncodeJob]
    features: dict[str, ItemFeatures] = field(default_factory=dict)


class PagedExecutor:
    """Encodes the pictures a step needs, then runs the text model over all its entries at once."""

    def __init__(
        self,
        loaded: LoadedModel,
        text: MeasuredText,
        config: EngineConfig,
        context: RoutingContext,
        vision: VisionStage,
        kv_bytes: int,
        kernels: Kernels | None = None,
    ) -> None:
        """kv_bytes: for KV pages, and the states that sequences carry beside them. kernels: for decode steps."""
        page_bytes = text.token_bytes * config.page_tokens
        max_running = affordable_running(config, kv_bytes, page_bytes, text.state_bytes)
        usable = max_running * pages_for(loaded.max_model_len, config.page_tokens)
        num_pages = min(usable, (kv_bytes - max_running * text.state_bytes) // page_bytes)
        kv = text.storage(num_pages, config.page_tokens)
        self.limits = Limits(
            num_pages,
            config.page_tokens,
            config.max_step_tokens,
            max_running,
            # Pages hold no state: a sequence whose layers carry one cannot begin in the middle.
            shares_pages=config.prefix_cache and not text.runner.carries_state,
            state_bytes=text.state_bytes,
        )
        self._text = text
        self._context = context
        self._two_way = loaded.two_way
        self._two_way_ids = loaded.two_way_ids
        self._vision = vision
        self._runner = Runner(text.runner, kv, context, kernels)
        self._media: dict[str, _Media] = {}

    @torch.inference_mode()
    def rehearse(self, num_tokens: int) -> None:
        with self._context.text(segments([num_tokens], [None])):
            rehearse(self._text.runner, num_tokens, self._text.position_rows)

    def start(self, seq: sequence.Sequence, prompt: PreparedPrompt) -> None:
        jobs = [EncodeJob.of(item, seq.adapter, seq.cache_salt) for item in prompt.items]
        seq.media = _media_spans(prompt, jobs)
        seq.bidirectional_spans = two_way_spans(self._two_way, prompt, self._two_way_ids)
        seq.span_holes = span_holes(self._two_way, prompt, self._two_way_ids)
        seq.keeps_prompt = self._text.runner.keeps_prompt
        self._media[seq.request_id] = _Media({job.key: job for job in jobs})

    def prepare(self, entries: Sequence[StepEntry]) -> dict[str, PolylensError]:
        """Get the features the entries need; sequences whose pictures fail have the error."""
        wanted: dict[str, EncodeJob] = {}
        needs: list[tuple[str, str]] = []
        for entry in entries:
            media = self._media[entry.seq.request_id]
            # A dict, not a set: the order of items in an encoder batch must not differ from run to run.
            for key in dict.fromkeys(span.vision_key for span in entry.media):
                if key in media.features:
                    continue
                wanted[key] = media.jobs[key]
                needs.append((entry.seq.request_id, key))
        found = self._vision.encode(list(wanted.values()))
        failed: dict[str, PolylensError] = {}
        for request_id, key in needs:
            features = found[key]
            if isinstance(features, PolylensError):
                failed[request_id] = features
            else:
                self._media[request_id].features[key] = features
        return failed

    def run(self, entries: Sequence[StepEntry]) -> torch.Tensor:
        logits_sv = self._runner.run(entries, self._features(entries))
        for entry in entries:
            if entry.samples:
                self._media[entry.seq.request_id].features.clear()
        return logits_sv

    def end(self, seq: sequence.Sequence) -> None:
        self._media.pop(seq.request_id, None)

    def _features(self, entries: Iterable[StepEntry]) -> dict[str, ItemFeatures]:
        return {
            span.vision_key: self._media[entry.seq.request_id].features[span.vision_key]
            for entry in entries
            for span in entry.media
        }


def _media_spans(prompt: PreparedPrompt, jobs: Sequence[EncodeJob]) -> tuple[MediaSpan, ...]:
    """The prompt's media runs with the offsets of their rows within their items, in prompt order."""
    spans = []
    for slot in prompt.slots:
        offset = 0
        for start, length in slot.positions:
            spans.append(MediaSpan(start, length, jobs[slot.item_index].key, slot.item_index, offset))
            offset += length
    return tuple(sorted(spans, key=lambda span: span.start))
