"""The memory plan: what a model's work needs at most, and what is left for its caches and adapters.

Measured (see `measure`): the working memory of encoder batches and text steps as they grow. Derived: the largest
media item that is let in, so that no request let in needs more than planned. Left over: KV pages, vision cache,
adapters. A value that the configuration names is taken as it is.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

from polylens.config import MIB
from polylens.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polylens.config import EngineConfig

MARGIN = 1.1
"""Planned over measured: allocators round up, and kernel libraries hold buffers of their own."""

ENCODER_SHARE = 0.25
"""Most of the budget that the encoder's working memory may take: beyond it media are limited, not the rest."""

ADAPTER_SHARE = 0.25
"""Of what is left after the working memory: some dozens of adapters for a model of a few billion parameters."""

VISION_SHARE = 0.1
"""Of what is left: features are small beside KV pages (one row a visual token, not two rows a layer)."""


MAX_STATE_SHARE = 0.5
"""Part of the KV memory that states which layers carry from token to token (Qwen3.5, LFM2) may take: they are as large
for a short answer as for a long one, and must leave room for the pages of long ones."""


@dataclass(frozen=True)
class Curve:
    """Bytes needed at growing sizes, from measurements at (at least two) sizes, smallest first."""

    points: tuple[tuple[int, int], ...]

    def at(self, size: int) -> int:
        """Bytes at `size`, with MARGIN. Up to the largest size measured: those of the next larger size measured.

        Beyond it growth goes on as a line, or as a parabola where the slope itself was seen to grow (masks).
        """
        for measured, needed in self.points:
            if size <= measured:
                return int(MARGIN * needed)
        (x0, y0), (x1, y1) = self.points[-2:]
        slope = max(0.0, (y1 - y0) / (x1 - x0))
        bend = max(0.0, self._bend(slope))
        return int(MARGIN * (y1 + slope * (size - x1) + bend * (size - x0) * (size - x1)))

    @property
    def least(self) -> int:
        """The smallest size measured: a smaller one counts as much."""
        return self.points[0][0]

    def largest_within(self, budget: int, most: int) -> int:
        """The largest size up to `most` that needs at most `budget` bytes; 0 if none does."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.at(middle) <= budget else (low, middle - 1)
        return low

    def _bend(self, last_slope: float) -> float:
        """The parabola's leading term through the last three points; 0 with two."""
        if len(self.points) < 3:
            return 0.0
        (x0, y0), (x1, y1), (x2, _) = self.points[-3:]
        return (last_slope - (y1 - y0) / (x1 - x0)) / (x2 - x0)


@dataclass(frozen=True)
class Needs:
    """What was measured of one model, and sizes that follow from its config. Bytes, rows and tokens.

    adapter_scratch_bytes: one layer's weight, rebuilt for a segment. longest_span: tokens that see each other in both
    directions, so that no step can divide them (Gemma's pictures, PaliGemma's prompts). step: by tokens of a step, its
    contexts growing alike up to the model's length in the `longest_step`; None where transformers generates (nothing is
    measured then). state_bytes: of a running request, beside its KV pages. batch, item: the encoder's by input rows, of
    many small items and of one large one; None without encoder. feature_bytes: of one media token. rows_per_token:
    input rows of the encoder for each media token, at most.
    """

    adapter_scratch_bytes: int
    max_model_len: int
    longest_span: int = 0
    step: Curve | None = None
    kv_token_bytes: int = 0
    state_bytes: int = 0
    batch: Curve | None = None
    item: Curve | None = None
    feature_bytes: int = 0
    rows_per_token: float = 0.0

    def longest_step(self, config: EngineConfig) -> int:
        """Tokens of a step at most."""
        return max(config.max_step_tokens, self.longest_span)

    @property
    def largest_item_rows(self) -> int:
        """Input rows of an item that fills the model's length."""
        return int(self.max_model_len * self.rows_per_token)


@dataclass(frozen=True)
class MemoryPlan:
    """How memory is divided, in bytes; `max_encoder_rows`, `max_item_rows` in input rows of the encoder.

    budget_bytes: for all of it, beside the weights. working_bytes: the larger of an encoder batch and a text step,
    with the scratch for one adapted layer and the features on their way.
    """

    budget_bytes: int
    weight_bytes: int
    encoder_bytes: int
    step_bytes: int
    adapter_scratch_bytes: int
    features_bytes: int
    kv_bytes: int
    vision_cache_bytes: int
    adapter_bytes: int
    max_encoder_rows: int
    max_item_rows: int
    kv_tokens: int
    measured: bool = True
    """False where transformers generates, with caches of its own, one request at a time."""

    @property
    def working_bytes(self) -> int:
        return max(self.encoder_bytes, self.step_bytes) + self.adapter_scratch_bytes + self.features_bytes

    @property
    def taken_bytes(self) -> int:
        return self.working_bytes + self.kv_bytes + self.vision_cache_bytes + self.adapter_bytes

    def parts(self) -> dict[str, int]:
        """What the bytes are for, in the order they are set aside. Of encoder and text step the larger one counts."""
        return {
            "encoder batch": self.encoder_bytes,
            "text step": self.step_bytes,
            "one adapted layer": self.adapter_scratch_bytes,
            "features on their way": self.features_bytes,
            "adapters": self.adapter_bytes,
            "vision cache": self.vision_cache_bytes,
            "KV pages": self.kv_bytes,
        }

    def lines(self) -> Iterator[str]:
        """The plan as a person reads it."""
        yield f"{'weights':<24}{_mib(self.weight_bytes)}"
        yield f"{'to divide beside them':<24}{_mib(self.budget_bytes)}"
        if not self.measured:
            yield "one request at a time, by transformers' own generation: what that needs is not measured"
            yield f"  {'adapters':<22}{_mib(self.adapter_bytes)}"
            return
        for name, size in self.parts().items():
            yield f"  {name:<22}{_mib(size)}"
        yield f"KV pages hold {self.kv_tokens:,} tokens"
        yield f"an encoder batch holds {self.max_encoder_rows:,} rows, one picture or video {self.max_item_rows:,}"

    def to_json(self) -> dict[str, int]:
        return {**asdict(self), "working_bytes": self.working_bytes, "taken_bytes": self.taken_bytes}


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:12,.1f} MiB"


def plan_memory(
    needs: Needs, config: EngineConfig, *, budget_bytes: int, free_bytes: int, weight_bytes: int
) -> MemoryPlan:
    """Divide `budget_bytes`. free_bytes: what sizes the configuration names may take together at most.

    Raises ModelLoadError when not even one short request fits, with what is missing and what to lower.
    """
    if needs.step is None:
        return _unmeasured(needs, config, budget_bytes, weight_bytes)
    named = (config.kv_bytes or 0) + (config.vision_cache_bytes or 0) + (config.adapter_device_bytes or 0)
    if _working(needs, config, budget_bytes).total + named > budget_bytes:
        budget_bytes = free_bytes  # the user wants more than we would take unasked
    working = _working(needs, config, budget_bytes)
    rest = max(0, budget_bytes - working.total - named)
    adapters = _given(config.adapter_device_bytes, int(ADAPTER_SHARE * rest))
    vision = _given(config.vision_cache_bytes, int(VISION_SHARE * rest))
    left = max(0, budget_bytes - working.total - adapters - vision)
    kv = min(_most_kv(needs, config), config.kv_bytes or left)
    plan = MemoryPlan(
        budget_bytes=budget_bytes,
        weight_bytes=weight_bytes,
        encoder_bytes=working.encoder,
        step_bytes=working.step,
        adapter_scratch_bytes=needs.adapter_scratch_bytes,
        features_bytes=working.features,
        kv_bytes=kv,
        vision_cache_bytes=vision,
        adapter_bytes=adapters,
        max_encoder_rows=working.batch_rows,
        max_item_rows=working.item_rows,
        kv_tokens=_kv_tokens(kv, needs, config),
    )
    _check_fits(plan, needs, config, free_bytes)
    return plan


def affordable_running(config: EngineConfig, kv_bytes: int, page_bytes: int, state_bytes: int) -> int:
    """Sequences decoded together: no more than whose carried states fill their part and leave a page."""
    if state_bytes == 0:
        return config.max_running
    affordable = min(int(kv_bytes * MAX_STATE_SHARE), kv_bytes - page_bytes) // state_bytes
    return min(config.max_running, affordable)


def _kv_tokens(kv_bytes: int, needs: Needs, config: EngineConfig) -> int:
    """Tokens in the pages, beside the states of as many sequences as run."""
    running = affordable_running(config, kv_bytes, needs.kv_token_bytes * config.page_tokens, needs.state_bytes)
    return max(0, kv_bytes - max(0, running) * needs.state_bytes) // needs.kv_token_bytes


def _given(named: int | None, otherwise: int) -> int:
    return otherwise if named is None else named


def _unmeasured(needs: Needs, config: EngineConfig, budget_bytes: int, weight_bytes: int) -> MemoryPlan:
    """The plan where transformers generates: only adapters are ours to bound."""
    return MemoryPlan(
        budget_bytes=budget_bytes,
        weight_bytes=weight_bytes,
        encoder_bytes=0,
        step_bytes=0,
        adapter_scratch_bytes=needs.adapter_scratch_bytes,
        features_bytes=0,
        kv_bytes=0,
        vision_cache_bytes=0,
        adapter_bytes=_given(config.adapter_device_bytes, int(ADAPTER_SHARE * budget_bytes)),
        max_encoder_rows=config.max_encoder_rows,
        max_item_rows=sys.maxsize,
        kv_tokens=0,
        measured=False,
    )


class _Working(NamedTuple):
    """Bytes of the working memory's parts, and the input rows that the encoder's part is for."""

    encoder: int
    batch_rows: int
    item_rows: int
    step: int
    features: int
    total: int


def _working(needs: Needs, config: EngineConfig, budget_bytes: int) -> _Working:
    batch_rows = item_rows = encoder = 0
    if needs.batch is not None and needs.item is not None:
        most = int(ENCODER_SHARE * budget_bytes)
        # Rows of one item need the most: so what holds an item of so many rows holds any batch of so many.
        any_rows = needs.item.largest_within(most, max(config.max_encoder_rows, needs.largest_item_rows))
        batch_rows = min(any_rows, needs.batch.largest_within(most, config.max_encoder_rows))
        item_rows = min(any_rows, needs.largest_item_rows)
        # The least that was measured is counted in any case.
        batch_rows, item_rows = max(batch_rows, needs.batch.least), max(item_rows, needs.item.least)
        encoder = max(needs.batch.at(batch_rows), needs.item.at(max(batch_rows, item_rows)))
    step = 0 if needs.step is None else needs.step.at(needs.longest_step(config))
    features = needs.feature_bytes * (needs.max_model_len + needs.longest_step(config))
    total = max(encoder, step) + needs.adapter_scratch_bytes + features
    return _Working(encoder, batch_rows, item_rows, step, features, total)


def _most_kv(needs: Needs, config: EngineConfig) -> int:
    """Bytes that all running requests could fill, each to the model's length."""
    pages = -(-needs.max_model_len // config.page_tokens)
    return (needs.kv_token_bytes * pages * config.page_tokens + needs.state_bytes) * config.max_running


def _check_fits(plan: MemoryPlan, needs: Needs, config: EngineConfig, free_bytes: int) -> None:
    least = _least_kv(needs, config)
    if config.kv_bytes is not None and config.kv_bytes < least:
        state = f" and its state {needs.state_bytes}" if needs.state_bytes else ""
        raise ModelLoadError(
            f"kv_bytes={config.kv_bytes} is too small for any request: one page of {config.page_tokens} tokens takes "
            f"{needs.kv_token_bytes * config.page_tokens} bytes{state}; give at least {least}"
        )
    missing = max(least - plan.kv_bytes, 0) + max(plan.taken_bytes - free_bytes, 0)
    if missing:
        parts = ", ".join(f"{name} {size}" for name, size in plan.parts().items())
        raise ModelLoadError(
            f"the model does not fit: beside its weights {free_bytes} bytes are free, and {missing} more are needed "
            f"(in bytes: {parts}); lower max_model_len, max_step_tokens, kv_bytes, vision_cache_bytes or "
            "adapter_device_bytes"
        )


def _least_kv(needs: Needs, config: EngineConfig) -> int:
    """Bytes that one request needs to begin; states may take no more than their share."""
    page = needs.kv_token_bytes * config.page_tokens
    return max(page + needs.state_bytes, int(needs.state_bytes / MAX_STATE_SHARE))
