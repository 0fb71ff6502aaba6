"""vLLM's model with our layers in it: what runs now, and whose rows it has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from vllm.multimodal.utils import group_and_batch_mm_kwargs

from polylens.core import Adapter, Component, LayerKind
from polylens.errors import RowRuleError
from polylens.hosts.vllm.items import EncoderItem
from polylens.hosts.vllm.layers import wrap_modules
from polylens.hosts.vllm.placement import place_layers
from polylens.hosts.vllm.proof import unproven_layers
from polylens.hosts.vllm.rules import find_encoder_rules
from polylens.lora.context import RoutingContext
from polylens.lora.routing import segments
from polylens.models.row_rules import ItemSize

if TYPE_CHECKING:
    from vllm.config import ModelConfig

    from polylens.hosts.vllm.base import BaseModel

logger = logging.getLogger(__name__)

HEAD = "lm_head"


class AdaptedModel:
    """Wraps the model in place.

    refused: layers of the base model that cannot be adapted here -> why. absent: layers that have no effect.
    """

    def __init__(self, model: Any, base: BaseModel, model_config: ModelConfig, device: torch.device) -> None:
        self._device = device
        specs = base.layers.specs
        head = next((name for name, spec in specs.items() if _is_head(name, spec)), None)
        self.ctx = RoutingContext(head)
        placement = place_layers(base, model)
        wrong = unproven_layers(base, model, placement.places)
        places = {name: place for name, place in placement.places.items() if name not in wrong}
        encoder = find_encoder_rules(model, model_config, specs, places, device)
        self.refused: Mapping[str, str] = {
            **placement.unplaced,
            **wrong,
            **dict.fromkeys(encoder.out_of_reach, "vLLM's encoder call does not run it"),
        }
        self.absent = frozenset(placement.absent)
        self.rules = encoder.rules
        self.mixed = encoder.mixed
        self._tokens: Sequence[Adapter | None] = ()
        self._sampled: Sequence[Adapter | None] = ()
        self._group: tuple[Sequence[EncoderItem], Sequence[Adapter | None]] | None = None
        wrap_modules(
            model, specs, {n: p for n, p in places.items() if n not in encoder.out_of_reach}, self.rules, self.ctx
        )
        self._wrap_calls(model)
        logger.info("%d layers take adapters, %d do not", len(places), len(self.refused))

    def set_text_rows(self, tokens: Sequence[Adapter | None], sampled: Sequence[Adapter | None]) -> None:
        """The adapter of every token of the next text forward, and of every row that gets logits."""
        self._tokens, self._sampled = tokens, sampled

    def set_encoder_rows(self, items: Sequence[EncoderItem], adapters: Sequence[Adapter | None]) -> None:
        """What the next encoder call holds. Without items, encoder calls are the base model's."""
        self._group = (items, adapters) if items else None

    def may_mix(self, modality: str) -> bool:
        """Whether one encoder call may hold items of several adapters."""
        return modality in self.mixed

    def _wrap_calls(self, model: Any) -> None:
        forward, compute_logits = model.forward, model.compute_logits
        embed = getattr(model, "embed_multimodal", None)

        def routed_forward(*args: Any, **kwargs: Any) -> Any:
            with self.ctx.text(_rows(self._tokens, _num_tokens(args, kwargs)), ()):
                return forward(*args, **kwargs)

        def routed_logits(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with self.ctx.text((), _rows(self._sampled, hidden_states.shape[0])):
                return compute_logits(hidden_states, *args, **kwargs)

        def routed_embed(**kwargs: Any) -> Any:
            assert embed is not None
            if self._group is None:
                return embed(**kwargs)
            return self._embed(embed, kwargs, *self._group)

        model.forward = routed_forward
        model.compute_logits = routed_logits
        if embed is not None:
            model.embed_multimodal = routed_embed

    def _embed(
        self,
        embed: Callable[..., Any],
        kwargs: Mapping[str, Any],
        items: Sequence[EncoderItem],
        adapters: Sequence[Adapter | None],
    ) -> Any:
        if len(set(adapters)) == 1:
            with self.ctx.whole(adapters[0]):  # all rows are its own, whatever the rules
                return embed(**kwargs)
        try:
            with self.ctx.encoder([ItemSize.of(item) for item in items], adapters):
                return embed(**kwargs)
        except RowRuleError as error:
            # Nothing of this call is used. An engine that answers many must not end for one: from now on it is slower.
            logger.warning("the encoder runs one adapter at a time from now on: %s", error)
            self.mixed = frozenset()
            return self._embed_in_turn(embed, items, adapters)

    def _embed_in_turn(
        self, embed: Callable[..., Any], items: Sequence[EncoderItem], adapters: Sequence[Adapter | None]
    ) -> list[torch.Tensor]:
        features: list[torch.Tensor] = []
        for adapter, pairs in groupby(zip(adapters, items, strict=True), key=lambda pair: pair[0]):
            batch = [(item.modality, item.data) for _, item in pairs]
            for _, _, kwargs in group_and_batch_mm_kwargs(batch, device=self._device):
                with self.ctx.whole(adapter):
                    features.extend(embed(**kwargs))
        return features


def _is_head(name: str, spec: Any) -> bool:
    text_linear = spec.component is Component.LANGUAGE_MODEL and spec.kind is LayerKind.LINEAR
    return text_linear and name.rpartition(".")[2] == HEAD


def _rows(owners: Sequence[Adapter | None], num_rows: int) -> Any:
    """Segments of the rows; rows beyond those of requests are padding, and the base model's."""
    if num_rows < len(owners):
        raise RowRuleError(f"vLLM runs {num_rows} rows for {len(owners)} rows of requests")
    runs = [(owner, len(list(run))) for owner, run in groupby(owners)]
    padding = num_rows - len(owners)
    return segments([*(count for _, count in runs), padding], [*(owner for owner, _ in runs), None])


def _num_tokens(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Rows of a text forward: its embeddings', or its token ids'."""
    for value in (kwargs.get("inputs_embeds"), kwargs.get("input_ids"), *args[:1]):
        if value is not None:
            return int(value.shape[0])
    raise RowRuleError("vLLM ran the text model with neither token ids nor embeddings")
