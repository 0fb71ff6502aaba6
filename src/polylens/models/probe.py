"""Find out how the rows of every encoder layer divide among the items of a batch, and prove it.

Counting rows proposes row rules; it cannot decide: in many families a wrong rule also divides evenly.
So every proposal is tested by what comes out. Each item of a synthetic batch gets its own random delta on
every layer, with the rows divided by the proposed rules, and all features must equal those of the items run
alone with their deltas. Two measurements make that a proof:

- the *noise floor*: batched against alone when all items share one delta, so that no division is involved.
  Equal means within EQUAL_FACTOR of it.
- the *contrast*: for each layer, the error when only this layer's deltas are given to the wrong items. It must
  be at least CONTRAST_FACTOR times the noise floor, or the layer's agreement says nothing.

A layer that fails either is UNPROVEN. Errors are relative to the root mean square of the features they are in.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from polylens.errors import RowRuleError
from polylens.models.probe_counts import MIN_ITEMS, Batch, propose
from polylens.models.probe_features import Encode, Features, difference, identical
from polylens.models.probe_hooks import Assignment, ProbeLayer, RandomDeltas
from polylens.models.row_rules import ItemSize, RowRule, SizedItem

EQUAL_FACTOR = 10.0
"""Errors up to this many noise floors count as equal: two measured noises rarely differ more."""

CONTRAST_FACTOR = 100.0
"""A wrong assignment must be this many noise floors away: an order of magnitude beyond "equal"."""

MIN_NOISE = 16 * torch.finfo(torch.float32).eps
"""Least noise floor assumed: a measured zero is luck of equal kernels, not a promise."""


@dataclass(frozen=True)
class ProbeResult:
    """The row rule of every probed layer, and what was measured to prove them.

    noise_floor, worst_error: relative errors. contrast: the least error of a wrong assignment over all proven
    layers, in noise floors (infinite when nothing was proven). reasons: why a layer is UNPROVEN. unreachable:
    layers whose weight matters although the layer is never called (its weight is read by other code), so that
    a delta on it could not be applied at all: adapters that touch them must be refused.
    """

    rules: Mapping[str, RowRule]
    noise_floor: float
    worst_error: float
    contrast: float
    reasons: Mapping[str, str] = field(default_factory=dict)
    unreachable: tuple[str, ...] = ()

    @property
    def mixed(self) -> bool:
        """Whether one encoder batch may hold items of different adapters (unreachable layers take no delta)."""
        return set(self.layers_with(RowRule.UNPROVEN)) <= set(self.unreachable)

    def layers_with(self, rule: RowRule) -> tuple[str, ...]:
        return tuple(name for name, value in self.rules.items() if value is rule)


def probe_row_rules(
    encode: Encode,
    batches: Sequence[Sequence[SizedItem]],
    layers: Sequence[ProbeLayer],
    *,
    declared: Mapping[str, RowRule] | None = None,
    seed: int = 0,
) -> ProbeResult:
    """Probe `layers` of the encoder behind `encode`.

    batches: one list of items per kind of media (images, videos), each of two or more items of unequal sizes;
    a rule must hold in all of them. declared: row rules by layer-name pattern (`re.search`), which replace the
    rules proposed by counts and are tested just the same. Raises RowRuleError when a batch is too small.
    """
    if not batches or any(len(batch) < MIN_ITEMS for batch in batches):
        raise RowRuleError(f"the probe needs batches of at least {MIN_ITEMS} items")
    with torch.no_grad(), exact_float32():
        return _Probe(encode, batches, layers, declared or {}, seed).run()


@contextmanager
def exact_float32() -> Iterator[None]:
    """Without TF32, whose rounding would be taken for noise."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Probe:
    def __init__(
        self,
        encode: Encode,
        batches: Sequence[Sequence[SizedItem]],
        layers: Sequence[ProbeLayer],
        declared: Mapping[str, RowRule],
        seed: int,
    ) -> None:
        self._encode = encode
        self._layers = layers
        self._declared = declared
        self._deltas = RandomDeltas(layers, max(len(batch) for batch in batches), seed)
        self._references: dict[frozenset[str], list[list[Features]]] = {}
        self._batches = [self._observe(batch) for batch in batches]
        self._reasons: dict[str, str] = {}

    def run(self) -> ProbeResult:
        called = [layer.name for layer in self._layers if any(batch.called(layer.name) for batch in self._batches)]
        self._noise = max(MIN_NOISE, self._shared_delta_error(called))
        proposed = {name: self._propose(name) for name in called}
        rules = self._search(proposed)
        worst_error = self._error(rules) if rules else 0.0
        contrasts = {name: self._contrast(name, rules) for name in rules}
        proven = {name for name, contrast in contrasts.items() if contrast >= CONTRAST_FACTOR}
        unreachable = tuple(
            layer.name for layer in self._layers if layer.name not in called and self._weight_matters(layer)
        )
        return ProbeResult(
            rules={
                layer.name: rules[layer.name] if layer.name in proven else self._moot_or_unproven(layer, unreachable)
                for layer in self._layers
            },
            noise_floor=self._noise,
            worst_error=worst_error,
            contrast=min((contrasts[name] for name in proven), default=math.inf),
            reasons=self._reasons,
            unreachable=unreachable,
        )

    # What counts propose

    def _observe(self, items: Sequence[SizedItem]) -> Batch:
        with self._deltas.applied(None) as calls:
            features = self._encode(items)
        alone_calls = []
        for item in items:
            with self._deltas.applied(None) as item_calls:
                self._encode([item])
            alone_calls.append(item_calls)
        return Batch(items, [ItemSize.of(item) for item in items], features, calls, alone_calls)

    def _propose(self, layer: str) -> tuple[RowRule, ...]:
        declared = [rule for pattern, rule in self._declared.items() if re.search(pattern, layer)]
        if declared:
            return (declared[0],)
        rules, reason = propose(layer, self._batches)
        if reason is not None:
            self._reasons[layer] = reason
        return rules

    # What outputs decide

    def _search(self, proposed: Mapping[str, Sequence[RowRule]]) -> dict[str, RowRule]:
        """One rule per layer such that all together reproduce the items run alone."""
        single = {name: rules[0] for name, rules in proposed.items() if len(rules) == 1}
        several = {name: rules for name, rules in proposed.items() if len(rules) > 1}
        found = self._decide(several)
        together = {**single, **found}
        if self._is_equal(together):
            return together
        together = {**self._decide({name: (rule,) for name, rule in single.items()}), **found}
        if self._is_equal(together):
            return together
        self._reasons.update(dict.fromkeys(together, "its rule holds by itself but not together with other layers"))
        return {}

    def _decide(self, proposed: Mapping[str, Sequence[RowRule]]) -> dict[str, RowRule]:
        """Test layers that look alike together, without deltas on the others; one by one where that fails."""
        groups: dict[object, list[str]] = defaultdict(list)
        for name, rules in proposed.items():
            groups[tuple(rules), self._signature(name)].append(name)
        found: dict[str, RowRule] = {}
        for (rules, _), names in groups.items():  # type: ignore[misc]
            rule = self._only_right(names, rules)
            if rule is not None:
                found.update(dict.fromkeys(names, rule))
            elif len(names) > 1:
                ones = {name: self._only_right([name], rules) for name in names}
                found.update({name: one for name, one in ones.items() if one is not None})
        for name in proposed.keys() - found.keys():
            self._reasons[name] = f"outputs do not single out one of {', '.join(proposed[name])}"
        return found

    def _signature(self, layer: str) -> str:
        return repr([batch.calls.get(layer) for batch in self._batches])

    def _only_right(self, names: Sequence[str], rules: Sequence[RowRule]) -> RowRule | None:
        """The one of `rules` that gives equal features, if all others are far off."""
        errors = {rule: self._error(dict.fromkeys(names, rule)) for rule in rules}
        right = [rule for rule, error in errors.items() if error <= EQUAL_FACTOR * self._noise]
        far = [rule for rule, error in errors.items() if error >= CONTRAST_FACTOR * self._noise]
        return right[0] if len(right) == 1 and len(far) == len(rules) - 1 else None

    def _is_equal(self, rules: Mapping[str, RowRule]) -> bool:
        return not rules or self._error(rules) <= EQUAL_FACTOR * self._noise

    def _error(self, rules: Mapping[str, RowRule]) -> float:
        """Each item its own deltas on the layers of `rules`: batched against alone, worst over all batches."""
        return max(self._batch_error(index, batch.positions, rules) for index, batch in enumerate(self._batches))

    def _batch_error(
        self, index: int, positions: Sequence[int], rules: Mapping[str, RowRule], rotated: frozenset[str] = frozenset()
    ) -> float:
        """The same for the items at `positions` of one batch; inf where a rule does not fit the rows at all."""
        batch, alone = self._batches[index], self._alone(rules)[index]
        assignment = Assignment([batch.sizes[position] for position in positions], positions, rules, rotated)
        try:
            with self._deltas.applied(assignment):
                actual = self._encode([batch.items[position] for position in positions])
        except RowRuleError:
            return math.inf
        return difference(actual, [alone[position] for position in positions])

    def _alone(self, rules: Mapping[str, RowRule]) -> list[list[Features]]:
        """Features of each item run alone with its own deltas on the layers of `rules`, per batch."""
        layers = frozenset(rules)
        if layers not in self._references:
            self._references[layers] = [
                [self._run_alone(batch, position, position, rules) for position in batch.positions]
                for batch in self._batches
            ]
        return self._references[layers]

    def _run_alone(self, batch: Batch, position: int, delta: int, rules: Mapping[str, RowRule]) -> Features:
        assignment = Assignment([batch.sizes[position]], [delta], rules)
        with self._deltas.applied(assignment):
            return self._encode([batch.items[position]])[0]

    def _shared_delta_error(self, layers: Sequence[str]) -> float:
        """Noise: one delta for all rows, batched against alone. No division of rows is involved."""
        rules = dict.fromkeys(layers, RowRule.UNPROVEN)
        worst = 0.0
        for batch in self._batches:
            with self._deltas.applied(Assignment(batch.sizes, [0] * len(batch.items), rules)):
                together = self._encode(batch.items)
            alone = [self._run_alone(batch, position, 0, rules) for position in batch.positions]
            worst = max(worst, difference(together, alone))
        return worst

    # Whether a test of a layer could have failed at all

    def _contrast(self, layer: str, rules: Mapping[str, RowRule]) -> float:
        """Least error, in noise floors, when this layer alone gives each item its neighbour's delta.

        Two items of each batch are enough. Batches in which the layer does nothing are left out; 0 when it
        does nothing in any.
        """
        errors = []
        for index, batch in enumerate(self._batches):
            error = self._batch_error(index, batch.smallest_two, rules, frozenset({layer}))
            if error >= CONTRAST_FACTOR * self._noise or self._has_effect(layer, batch):
                errors.append(error)
        return min(errors, default=0.0) / self._noise

    def _has_effect(self, layer: str, batch: Batch) -> bool:
        """Whether one delta on this layer alone changes any feature of the batch at all."""
        assignment = Assignment(batch.sizes, [0] * len(batch.items), {layer: RowRule.UNPROVEN})
        with self._deltas.applied(assignment):
            changed = self._encode(batch.items)
        return not identical(changed, batch.features)

    def _weight_matters(self, layer: ProbeLayer) -> bool:
        """Whether the weight of a layer that is never called is used all the same, by code that reads it."""
        if layer.is_sealed:
            return True
        original = layer.weight.detach().clone()
        try:
            noise = torch.randn(original.shape, generator=torch.Generator().manual_seed(0))
            layer.weight.copy_(noise.to(original))
            return any(not identical(self._encode(batch.items), batch.features) for batch in self._batches)
        finally:
            layer.weight.copy_(original)

    def _moot_or_unproven(self, layer: ProbeLayer, unreachable: Sequence[str]) -> RowRule:
        name = layer.name
        if name in unreachable:
            self._reasons[name] = "its weight is used without calling the layer"
            return RowRule.UNPROVEN
        if not any(batch.called(name) and self._has_effect(name, batch) for batch in self._batches):
            self._reasons.pop(name, None)
            return RowRule.NO_EFFECT
        self._reasons.setdefault(name, "a wrong assignment would not stand out from the noise")
        return RowRule.UNPROVEN
