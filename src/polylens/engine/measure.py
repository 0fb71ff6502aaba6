"""Measure what a loaded model needs: growing encoder batches and text steps, run for real, with their peaks traced.

A model that is quick enough is run at its full sizes. A slow one (billions of parameters on a CPU) is run at sizes
that take seconds, and its curve is carried on beyond them (`plan.Curve`). The result is kept on disk.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers

from polylens.core import Component, LayerKind, SamplingParams
from polylens.disk_cache import DiskCache
from polylens.engine.available import budget_and_free
from polylens.engine.peak import peak_bytes
from polylens.engine.plan import Curve, MemoryPlan, Needs, plan_memory
from polylens.engine.runner import Runner
from polylens.engine.sequence import MediaSpan, Sequence
from polylens.engine.step_plan import StepEntry
from polylens.engine.vision import encoder_rows
from polylens.errors import MediaError
from polylens.models.encoder import ItemFeatures, encode
from polylens.models.families import TwoWay
from polylens.models.loading import is_text_only
from polylens.models.positions import two_way_spans
from polylens.models.probe_items import picture_item, picture_prompt, synthetic_items, video_item
from polylens.models.probe_model import architecture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from polylens.config import EngineConfig
    from polylens.engine.kv import MeasuredText
    from polylens.lora.context import RoutingContext
    from polylens.models.loading import LoadedModel
    from polylens.models.prepared import ProcessedItem

logger = logging.getLogger(__name__)

VERSION = 2

CPU_FLOPS, GPU_FLOPS = 5e9, 2e13
"""Work spent on the largest measured size, if that is not below `_LEAST_ROWS`: a second or less."""

_FRACTIONS = (4, 2, 1)
"""The sizes measured: parts of the largest. Three show whether growth itself grows."""

_LEAST_ROWS = 64
"""Below it the peak is that of small fixed buffers and says little about growth."""

_ODD_SHAPES = ((16, 400), (400, 16), (100, 700), (700, 100), (512, 512))
_LONG_VIDEO = (16, 20, 200)
"""Height and width of pictures, frames and height and width of a video, whose rows and tokens are counted."""

_FIRST_SIDE = 32
_LARGEST_SIDE = 2048
"""Sides of square pictures tried (pixels): processors scale beyond any size down to their own limit."""


def make_plan(
    loaded: LoadedModel, text: MeasuredText | None, context: RoutingContext, config: EngineConfig
) -> MemoryPlan:
    """The memory plan of a loaded model; text: None where transformers generates.

    Raises ModelLoadError when it does not fit.
    """
    budget, free = budget_and_free(loaded.device, config.gpu_memory_utilization)
    plan = plan_memory(
        measure_needs(loaded, text, context, config),
        config,
        budget_bytes=budget,
        free_bytes=free,
        weight_bytes=sum(x.numel() * x.element_size() for x in loaded.model.parameters()),
    )
    logger.info("memory plan\n%s", "\n".join(plan.lines()))
    return plan


def measure_needs(
    loaded: LoadedModel, text: MeasuredText | None, context: RoutingContext, config: EngineConfig
) -> Needs:
    """What `loaded` needs; from disk where it was measured before."""
    cache = DiskCache("memory-needs", VERSION)
    facts = _facts(loaded, config)
    known = cache.load(facts, _from_json)
    if known is None:
        with torch.inference_mode():
            known = _without_runs(loaded) if text is None else _Measurement(loaded, text, context, config).run()
        cache.store(facts, _to_json(known))
    return known


def _facts(loaded: LoadedModel, config: EngineConfig) -> dict[str, Any]:
    return {
        "config": architecture(loaded.config.to_dict()),
        "class": type(loaded.model).__qualname__,
        "processor": loaded.processing.processor.to_dict() if loaded.processing.processor is not None else None,
        "versions": [torch.__version__, transformers.__version__],
        "dtype": str(loaded.dtype),
        "hosted": loaded.is_hosted,
        "device": str(loaded.device),
        "limits": [loaded.max_model_len, config.max_step_tokens, config.max_running, config.page_tokens],
        "max_encoder_rows": config.max_encoder_rows,
        "two_way": loaded.two_way,
    }


def _to_json(needs: Needs) -> dict[str, Any]:
    curves = {name: value.points for name, value in vars(needs).items() if isinstance(value, Curve)}
    return {**vars(needs), **curves}


def _from_json(content: Mapping[str, Any]) -> Needs:
    curves = {name: _curve(content[name]) for name in ("batch", "item", "step") if content[name] is not None}
    return Needs(**{**content, **curves})


def _curve(points: Any) -> Curve:
    return Curve(tuple((int(size), int(most)) for size, most in points))


def _without_runs(loaded: LoadedModel) -> Needs:
    return Needs(largest_layer_bytes(loaded), loaded.max_model_len)


class _Measurement:
    def __init__(self, loaded: LoadedModel, text: MeasuredText, context: RoutingContext, config: EngineConfig) -> None:
        self.loaded = loaded
        self._text = text
        self.context = context
        self.config = config
        self._squares: dict[int, ProcessedItem] = {}

    def run(self) -> Needs:
        features = None if is_text_only(self.loaded.config) else self._sample_features()
        self._longest_span = self._span_tokens()
        return replace(
            _without_runs(self.loaded),
            longest_span=self._longest_span,
            **self._of_media(features),
            step=self._step_curve(features),
            kv_token_bytes=self._text.token_bytes,
            state_bytes=self._text.state_bytes,
        )

    def _of_media(self, features: ItemFeatures | None) -> dict[str, Any]:
        if features is None:
            return {}
        return {
            "batch": self._encoder_curve(self._small_items),
            "item": self._encoder_curve(self._large_item),
            "feature_bytes": features.num_bytes // features.rows.shape[0],
            "rows_per_token": max(encoder_rows(self.loaded, item) / item.num_tokens for item in self._shapes()),
        }

    def _sample_features(self) -> ItemFeatures:
        self._samples = [item for batch in synthetic_items(self.loaded.processing) for item in batch]
        return self._encode(self._samples[:1])[0]

    def _shapes(self) -> Iterator[ProcessedItem]:
        """The samples, and pictures and videos of odd shapes: their padding has rows too, and no tokens."""
        yield from self._samples
        for height, width in _ODD_SHAPES:
            try:
                yield picture_item(self.loaded.processing, height, width)
            except MediaError:  # no request can have it
                continue
        if self.loaded.processing.takes_videos and self.loaded.processing.takes_pictures:
            yield video_item(self.loaded.processing, *_LONG_VIDEO)

    def _span_tokens(self) -> int:
        """Tokens that no step can divide: the longest prompt, or a large picture's longest run of tokens."""
        if self.loaded.two_way in (TwoWay.PROMPT, TwoWay.ALL_IMAGES):
            return self.loaded.max_model_len
        if self.loaded.two_way is TwoWay.NONE or is_text_only(self.loaded.config):
            return 0
        prompt = picture_prompt(self.loaded.processing, _LARGEST_SIDE, _LARGEST_SIDE)
        return max(stop - start for start, stop in two_way_spans(self.loaded.two_way, prompt))

    def _encode(self, items: list[ProcessedItem]) -> list[ItemFeatures]:
        return encode(self.loaded.inner, items, dtype=self.loaded.dtype, notes=self.loaded.notes)

    # Encoder batches

    def _encoder_curve(self, batch_of: Callable[[int], list[ProcessedItem]]) -> Curve:
        largest = self.config.max_encoder_rows
        while largest > _LEAST_ROWS and self._encoder_flops(largest) > self._flops:
            largest //= 2
        points: dict[int, int] = {}
        for part in _FRACTIONS:
            batch = batch_of(largest // part)
            rows = sum(encoder_rows(self.loaded, item) for item in batch)
            if rows not in points:
                points[rows] = peak_bytes(self.loaded.device, partial(self._encode, batch))
        if len(points) == 1:  # one tile is all that is affordable: two of them show the growth
            batch = batch * 2
            points[2 * rows] = peak_bytes(self.loaded.device, partial(self._encode, batch))
        return Curve(tuple(sorted(points.items())))

    def _small_items(self, num_rows: int) -> list[ProcessedItem]:
        """About `num_rows` input rows of the smallest pictures."""
        item = self._square(_FIRST_SIDE)
        return [item] * max(1, num_rows // encoder_rows(self.loaded, item))

    def _large_item(self, num_rows: int) -> list[ProcessedItem]:
        """One picture of at most `num_rows` input rows, as large as the processor makes them; several if it is less."""
        item = self._square(_FIRST_SIDE)
        side, rows = _FIRST_SIDE, encoder_rows(self.loaded, item)
        while (side := side * 2) <= _LARGEST_SIDE:
            larger = self._square(side)
            if encoder_rows(self.loaded, larger) > num_rows:
                break
            item, rows = larger, encoder_rows(self.loaded, larger)
        return [item] * max(1, num_rows // rows)

    def _square(self, side: int) -> ProcessedItem:
        if side not in self._squares:
            self._squares[side] = picture_item(self.loaded.processing, side, side)
        return self._squares[side]

    def _encoder_flops(self, num_rows: int) -> float:
        """As if all rows were one picture's that all see each other."""
        attention = 4 * num_rows**2 * self._depth_times_width()
        return 2 * num_rows * self._parameters(language=False) + attention

    def _depth_times_width(self) -> int:
        """Of the tower: every block's attention ends in a square layer or two."""
        specs = [s for s in self.loaded.layers.specs.values() if s.component is Component.VISION_TOWER]
        return sum(s.out_features for s in specs if _is_matrix(s.kind) and s.in_features == s.out_features)

    # Text steps

    def _step_curve(self, features: ItemFeatures | None) -> Curve:
        largest = self._longest_step
        while largest > _LEAST_ROWS and self._step_flops(largest) > self._flops:
            largest //= 2
        sizes = sorted({max(2, largest // part) for part in _FRACTIONS})
        points = [(size, peak_bytes(self.loaded.device, self._step(size, features))) for size in sizes]
        if len(points) == 1:
            points.append((2 * sizes[0], peak_bytes(self.loaded.device, self._step(2 * sizes[0], features))))
        return Curve(tuple(points))

    def _context(self, num_tokens: int) -> int:
        """Context of a sequence in a step of so many tokens: the model's whole length in a full step."""
        return max(num_tokens, self.loaded.max_model_len * num_tokens // self._longest_step)

    @property
    def _longest_step(self) -> int:
        return max(self.config.max_step_tokens, self._longest_span)

    def _step_flops(self, num_tokens: int) -> float:
        text = self.loaded.config.get_text_config()
        attention = 4 * num_tokens * self._context(num_tokens) * text.hidden_size * text.num_hidden_layers
        return 2 * num_tokens * self._parameters(language=True) + attention

    def _step(self, num_tokens: int, features: ItemFeatures | None) -> Callable[[], object]:
        """A step of decodes and one chunk of prefill that is all picture, each at the end of a long context.

        The contexts all lie in one page: what is read is the same amount, and storage is not measured here.
        """
        runner = Runner(self._text.runner, self._text.storage(1, self.config.page_tokens), self.context)
        context = self._context(num_tokens)
        decodes = min(self.config.max_running * num_tokens // self._longest_step, num_tokens - 1)
        chunk = num_tokens - decodes
        spans = () if features is None else (MediaSpan(context - chunk, chunk, "media", 0, 0),)
        entries = [self._entry(runner, context, 1) for _ in range(decodes)]
        entries.append(self._entry(runner, context, chunk, spans))
        given = {} if features is None else {"media": ItemFeatures(*_repeated(features, chunk))}
        return lambda: runner.run(entries, given).softmax(-1)

    def _entry(self, runner: Runner, context: int, num_new: int, media: tuple[MediaSpan, ...] = ()) -> StepEntry:
        start = context - num_new
        seq = Sequence(
            request_id="measurement",
            adapter=None,
            prompt_ids=[0] * context,
            sampling=SamplingParams(),
            positions=torch.arange(context).expand(self._text.position_rows, -1),
            page_table=[0] * -(-context // self.config.page_tokens),
        )
        if self._text.runner.carries_state and start > 0:  # a state's size is that of one token's
            runner.run([StepEntry(seq, 0, 1, samples=True)], {})
            assert seq.carried is not None
            seq.carried.num_tokens = start
        seq.media = media
        if num_new > 1 and self.loaded.two_way is not TwoWay.NONE:
            seq.bidirectional_spans = ((start, context),)
        return StepEntry(seq, start, context, samples=True)

    # Sizes

    @property
    def _flops(self) -> float:
        return CPU_FLOPS if self.loaded.device.type == "cpu" else GPU_FLOPS

    def _parameters(self, *, language: bool) -> int:
        """Parameters of the linear layers of the language model, or of all others."""
        specs = self.loaded.layers.specs.values()
        chosen = [spec for spec in specs if (spec.component is Component.LANGUAGE_MODEL) == language]
        return max(1, sum(spec.in_features * spec.out_features for spec in chosen if _is_matrix(spec.kind)))


def largest_layer_bytes(loaded: LoadedModel) -> int:
    """Bytes of the largest weight that an adapter may change: the scratch that one layer's fused delta takes."""
    sizes = [spec.in_features * spec.out_features for spec in loaded.layers.specs.values() if _is_matrix(spec.kind)]
    return max(sizes, default=0) * loaded.dtype.itemsize


def _is_matrix(kind: LayerKind) -> bool:
    return kind in (LayerKind.LINEAR, LayerKind.MATMUL, LayerKind.CONV)


def _repeated(features: ItemFeatures, num_rows: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Features of any number of rows, for a step that only needs their shape."""
    index = torch.arange(num_rows, device=features.rows.device) % features.rows.shape[0]
    return features.rows[index], tuple(level[index] for level in features.deepstack)
