"""Encoder calls that know whose items they hold, for both of vLLM's model runners.

vLLM cuts a step's items into groups with `group_and_batch_mm_kwargs` and encodes each group as it gets it. Here the
groups are told whose items they hold before the runner has them, and are cut where an adapter must be alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

from polylens.hosts.vllm.items import EncoderItem

if TYPE_CHECKING:
    from polylens.core import Adapter
    from polylens.hosts.vllm.model import AdaptedModel

Pair = tuple[str, Any]
"""Modality and vLLM's `MultiModalKwargsItem`."""

GROUPING = "group_and_batch_mm_kwargs"


class EncoderCalls:
    """Whose the items of a step are."""

    def __init__(self, adapted: AdaptedModel) -> None:
        self._adapted = adapted
        self._owners: dict[int, tuple[EncoderItem, Adapter | None]] = {}

    def note(self, pair: Pair, num_tokens: int, owner: Adapter | None) -> Pair:
        """The pair to encode for `owner`. num_tokens: rows that the text model gets of it."""
        modality, data = pair
        # One object may stand for the same picture of two requests: its copy is this request's alone.
        data = copy.copy(data)
        self._owners[id(data)] = (EncoderItem(modality, data, num_tokens), owner)
        return modality, data

    def order(self, pairs: list[Pair]) -> list[int]:
        """The indices of noted pairs by modality, and inside one by adapter, so that few groups have to be cut."""
        owners = [self._owners[id(data)][1] for _, data in pairs]
        ranks = {owner: rank for rank, owner in enumerate(dict.fromkeys(owners))}
        return sorted(range(len(pairs)), key=lambda i: (pairs[i][0], ranks[owners[i]]))

    @contextmanager
    def routed(self, runner_module: Any) -> Iterator[None]:
        """Route the encoder calls that the runner of this module makes; afterwards, none is noted."""
        grouped: Callable[..., Iterator[Any]] = getattr(runner_module, GROUPING)

        def routed_groups(pairs: Any, **kwargs: Any) -> Iterator[Any]:
            return self._routed_groups(grouped, pairs, **kwargs)

        setattr(runner_module, GROUPING, routed_groups)
        try:
            yield
        finally:
            setattr(runner_module, GROUPING, grouped)
            self._adapted.set_encoder_rows((), ())
            self._owners = {}

    def _routed_groups(
        self, grouped: Callable[..., Iterator[Any]], pairs: list[Pair], **kwargs: Any
    ) -> Iterator[tuple[str, int, Any]]:
        """vLLM's groups of items, cut where an adapter must be alone; the caller encodes each before it asks on."""
        if not any(id(data) in self._owners for _, data in pairs):
            yield from grouped(pairs, **kwargs)  # vLLM's own items, to measure memory with: the base model's
            return
        for _, members in groupby(pairs, key=self._mixing_key):
            run = list(members)
            start = 0
            for modality, num_items, batch in grouped(run, **kwargs):
                known = [self._owners[id(data)] for _, data in run[start : start + num_items]]
                start += num_items
                # Not undone when this generator ends: vLLM takes one group of it, drops it, and encodes then.
                self._adapted.set_encoder_rows([item for item, _ in known], [owner for _, owner in known])
                yield modality, num_items, batch

    def _mixing_key(self, pair: Pair) -> Any:
        modality, data = pair
        item, owner = self._owners[id(data)]
        divisible = item.has_pixels and (owner is None or not owner.undivided)
        return modality, None if divisible and self._adapted.may_mix(modality) else owner
