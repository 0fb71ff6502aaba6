"""The routing context: what wrapped layers ask, before they compute, whose their rows are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

from torch import nn

from polylens.core import Adapter, Change, Component, LayerSpec
from polylens.errors import InternalError, RowRuleError
from polylens.lora.modules import with_parameters
from polylens.lora.routing import (
    DeltaRows,
    Segment,
    Segments,
    check_cover,
    cut,
    delta_rows,
    distinct,
    num_rows,
    segments,
)
from polylens.models.row_rules import COUNTED_RULES, ItemSize, RowRule, num_calls, rows_per_item


class _Routing(Protocol):
    """How the rows of one forward are owned."""

    def delta_rows(self, spec: LayerSpec, rule: RowRule, num_rows: int) -> tuple[DeltaRows[Change], ...]: ...

    def has_delta(self, layer: str) -> bool: ...


class RoutingContext:
    """Says which deltas a layer adds to which of its rows, for the forward that runs now.

    The engine opens `text`, `encoder` or `whole` around a forward; outside of them, and inside when no adapter is
    in the batch, the context is not active and layers run as the base model's. One context serves one
    engine thread: it holds the state of the forward that runs now and takes no lock.

    head_layer: name of the language layer that sees its own list of rows (`lm_head`: only rows that
    need logits); None when there is no such layer.
    """

    def __init__(self, head_layer: str | None = None) -> None:
        self._head_layer = head_layer
        self._watched: dict[str, RowRule] = {}
        self._shared: dict[str, tuple[nn.Module, str]] = {}
        self._open = False
        self._routing: _Routing | None = None
        self.special = False
        """Whether an adapter of the forward that runs now has more than plain factors (`Adapter.special`)."""
        self.num_tokens = 0
        """Tokens of the text forward that runs now; 0 outside of one."""

    @property
    def active(self) -> bool:
        """Whether a forward with at least one adapter runs now."""
        return self._routing is not None

    def watch_calls(self, layer: str, rule: RowRule = RowRule.PER_CALL) -> None:
        """Declare a layer of one of COUNTED_RULES: an encoder forward that calls it too seldom is then an error."""
        self._watched[layer] = rule

    def forget_calls(self, layer: str) -> None:
        """Take back `watch_calls`."""
        self._watched.pop(layer, None)

    def share(self, layer: str, module: nn.Module, parameter: str) -> None:
        """Declare a parameter of the tower that all items share: adapters that change it run there alone."""
        self._shared[layer] = (module, parameter)

    def forget_shared(self) -> None:
        """Take back all of `share`."""
        self._shared.clear()

    @contextmanager
    def text(self, token_segments: Sequence[Segment], head_segments: Sequence[Segment] | None = None) -> Iterator[None]:
        """Route a text forward: language layers (and connectors, should they be called) see the tokens' rows, the
        head layer its own.

        Both are as `routing.segments` makes them, base rows included. head_segments None: the head layer
        sees the tokens' rows too.
        """
        head = token_segments if head_segments is None else head_segments
        check_cover(token_segments)
        check_cover(head)
        adapters = [segment.adapter for segment in (*token_segments, *head) if segment.adapter is not None]
        routing = _TextRouting(tuple(token_segments), tuple(head), self._head_layer) if adapters else None
        with self._entered(routing, special=any(adapter.special for adapter in adapters)):
            self.num_tokens = num_rows(token_segments)
            yield

    @contextmanager
    def only_rows(self, ranges: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Inside `text`: language layers see only these [start, stop) ranges of the tokens' rows, one after the other.

        For layers that take the sequences of a step one by one.
        """
        if not self._open:
            yield
            return
        whole, num_tokens = self._routing, self.num_tokens
        if whole is not None:
            if not isinstance(whole, _TextRouting):
                raise InternalError("a part of the rows was asked for outside of a text step")
            self._routing = whole.part(tuple(ranges))
        self.num_tokens = sum(stop - start for start, stop in ranges)
        try:
            yield
        finally:
            self._routing, self.num_tokens = whole, num_tokens

    @contextmanager
    def encoder(self, sizes: Sequence[ItemSize], adapters: Sequence[Adapter | None]) -> Iterator[None]:
        """Route an encoder forward over items of these sizes, item k with `adapters[k]`, in batch order.

        Raises RowRuleError on leaving when a layer of one of COUNTED_RULES with an active delta was called fewer
        times than its rule says: the features must then not be used.
        """
        if len(sizes) != len(adapters):
            raise InternalError(f"{len(sizes)} item sizes for {len(adapters)} adapters")
        if all(adapter is None for adapter in adapters):
            with self._entered(None, special=False):
                yield
            return
        routing = _EncoderRouting(tuple(sizes), tuple(adapters))
        special = any(adapter is not None and adapter.special for adapter in adapters)
        with self._entered(routing, special=special), self._shared_of(adapters):
            yield
            routing.check_calls(self._watched)

    @contextmanager
    def whole(self, adapter: Adapter | None) -> Iterator[None]:
        """Route a forward of the whole model for one request: all rows of every layer are `adapter`'s."""
        routing = None if adapter is None else _WholeRouting(adapter)
        special = adapter is not None and adapter.special
        with self._entered(routing, special=special), self._shared_of([adapter]):
            yield

    @contextmanager
    def _shared_of(self, adapters: Sequence[Adapter | None]) -> Iterator[None]:
        """The parameters that all items share, as the one adapter of the batch has them."""
        undivided = next((one for one in adapters if one is not None and one.undivided), None)
        if undivided is None:
            yield
            return
        if len(_vision_digests(adapters)) > 1:
            raise RowRuleError(
                "an adapter of the batch changes parameters of the tower that all items share: run its items alone"
            )
        with ExitStack() as stack:
            for layer, (module, parameter) in self._shared.items():
                change = undivided.deltas.get(layer)
                if change is not None:
                    own = module.get_parameter(parameter)
                    new = change.tensors()["weight"].to(own.device, own.dtype)
                    stack.enter_context(with_parameters(module, {parameter: new}))
            yield

    def delta_rows(self, spec: LayerSpec, rule: RowRule, num_rows: int) -> tuple[DeltaRows[Change], ...]:
        """The deltas to add to a call of this layer with `num_rows` rows, and their rows.

        Empty when no adapter of the batch touches the layer. Raises RowRuleError when the rows cannot be
        assigned: the caller asks before it computes, so no result with wrong rows exists.
        """
        if self._routing is None:
            return ()
        return self._routing.delta_rows(spec, rule, num_rows)

    def has_delta(self, layer: str) -> bool:
        """Whether an adapter of the forward that runs now has a delta for this layer."""
        return self._routing is not None and self._routing.has_delta(layer)

    @contextmanager
    def _entered(self, routing: _Routing | None, *, special: bool) -> Iterator[None]:
        if self._open:
            raise InternalError("a routing context was opened inside another one")
        self._open = True
        self._routing = routing
        self.special = special
        try:
            yield
        finally:
            # Also drops the references to the adapters, whose memory an unload expects to get back.
            self._routing = None
            self.special = False
            self.num_tokens = 0
            self._open = False


class _WholeRouting:
    """Every row belongs to one adapter: which layer it is in, and how often it is called, does not matter."""

    def __init__(self, adapter: Adapter) -> None:
        self._deltas = adapter.deltas

    def delta_rows(self, spec: LayerSpec, rule: RowRule, num_rows: int) -> tuple[DeltaRows[Change], ...]:
        delta = self._deltas.get(spec.name)
        return () if delta is None else (DeltaRows(delta, 0, num_rows),)

    def has_delta(self, layer: str) -> bool:
        return layer in self._deltas


class _TextRouting:
    """Rows are tokens of sequences, the same ones for every language layer but the head."""

    def __init__(self, tokens: Segments, head: Segments, head_layer: str | None) -> None:
        self._tokens = tokens
        self._head = head
        self._head_layer = head_layer
        self._parts: dict[tuple[tuple[int, int], ...], _TextRouting] = {}

    def part(self, ranges: tuple[tuple[int, int], ...]) -> _TextRouting:
        """The same for some of the rows; remembered, because the layers of a step ask for equal parts."""
        found = self._parts.get(ranges)
        if found is None:
            found = _TextRouting(cut(self._tokens, ranges), self._head, self._head_layer)
            self._parts[ranges] = found
        return found

    def delta_rows(self, spec: LayerSpec, rule: RowRule, num_rows: int) -> tuple[DeltaRows[Change], ...]:
        routed = self._segments_of(spec.name)
        found = delta_rows(routed, spec.name)
        if found:
            _check_text_call(spec, num_rows, routed)
        return found

    def has_delta(self, layer: str) -> bool:
        return bool(delta_rows(self._segments_of(layer), layer))

    def _segments_of(self, layer: str) -> Segments:
        return self._head if layer == self._head_layer else self._tokens


def _check_text_call(spec: LayerSpec, rows: int, routed: Segments) -> None:
    if spec.component is Component.VISION_TOWER:  # a connector may embed some tokens (`FamilyNotes.embed`)
        raise RowRuleError(f"layer {spec.name}: a layer of the {spec.component.value} was called in a text step")
    if rows != num_rows(routed):
        raise RowRuleError(
            f"layer {spec.name}: called with {rows} rows in a text step that gives it {num_rows(routed)} rows"
        )


class _EncoderRouting:
    """Rows belong to media items, divided by each layer's row rule."""

    def __init__(self, sizes: tuple[ItemSize, ...], adapters: tuple[Adapter | None, ...]) -> None:
        self._sizes = sizes
        self._adapters = adapters
        self._distinct = distinct(adapters)
        self._divided: dict[tuple[RowRule, int], Segments] = {}
        self._calls: dict[str, int] = {}

    def delta_rows(self, spec: LayerSpec, rule: RowRule, num_rows: int) -> tuple[DeltaRows[Change], ...]:
        if rule is RowRule.NO_EFFECT or not self.has_delta(spec.name):
            return ()
        if spec.component is Component.LANGUAGE_MODEL:
            raise RowRuleError(f"layer {spec.name}: a layer of the language model was called in an encoder step")
        return delta_rows(self._segments_of(spec.name, rule, num_rows), spec.name)

    def has_delta(self, layer: str) -> bool:
        return any(adapter is not None and layer in adapter.deltas for adapter in self._distinct)

    def check_calls(self, watched: Mapping[str, RowRule]) -> None:
        """Raise RowRuleError if a watched layer with a delta saw fewer calls than its rule says."""
        for layer, rule in sorted(watched.items()):
            calls = self._calls.get(layer, 0)
            if calls < num_calls(rule, self._sizes) and self.has_delta(layer):
                raise RowRuleError(
                    f"layer {layer}: called {calls} times for {len(self._sizes)} items (row rule {rule.value!r})"
                )

    def _segments_of(self, layer: str, rule: RowRule, rows: int) -> Segments:
        if rule is RowRule.UNPROVEN:
            return self._undivided(layer, rows)
        if rule in COUNTED_RULES:
            return self._divide(rule, rows, self._count_call(layer, rule), layer)
        # Layers of equal rule and row count share one answer: a tower has hundreds of layers and few answers.
        key = (rule, rows)
        found = self._divided.get(key)
        if found is None:
            found = self._divided[key] = self._divide(rule, rows, 0, layer)
        return found

    def _divide(self, rule: RowRule, rows: int, call_index: int, layer: str) -> Segments:
        counts = rows_per_item(rule, self._sizes, rows, call_index=call_index, layer=layer)
        return segments(counts, self._adapters)

    def _count_call(self, layer: str, rule: RowRule) -> int:
        index = self._calls.get(layer, 0)
        if index >= num_calls(rule, self._sizes):
            raise RowRuleError(
                f"layer {layer}: call number {index + 1} in a batch of {len(self._sizes)} items "
                f"(row rule {rule.value!r})"
            )
        self._calls[layer] = index + 1
        return index

    def _undivided(self, layer: str, rows: int) -> Segments:
        """All rows to the one adapter of the batch: right whatever the rule, so none needs to be proven."""
        if len(_vision_digests(self._distinct)) > 1:
            raise RowRuleError(
                f"layer {layer}: it has no proven row rule, so a batch must not mix adapters in it "
                f"({len(self._distinct)} given); run the encoder with one adapter at a time"
            )
        return segments([rows], self._distinct[:1])


def _vision_digests(adapters: Sequence[Adapter | None]) -> set[str]:
    """What adapters do to the encoder, by content: two names may stand for the same."""
    return {"" if adapter is None else adapter.vision_digest for adapter in adapters}
