"""vLLM's model with our layers in it: what runs now, and whose rows it has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from vllm.multimodal.utils import group_and_batch_mm_kwargs

from polylens.core import Adapter, Component, LayerKind
from polylens.errors import RowRuleError
from polylens.hosts.vllm.items import EncoderItem, by_item
from polylens.hosts.vllm.layers import wrap_modules
from polylens.hosts.vllm.placement import place_layers
from polylens.hosts.vllm.proof import unproven_layers
from polylens.hosts.vllm.reach import fault_of_calls, record_calls
from polylens.hosts.vllm.rules import find_encoder_rules
from polylens.hosts.vllm.shared import unread_parameters
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
        self._head = next((name for name, spec in specs.items() if _is_head(name, spec)), None)
        self.ctx = RoutingContext(self._head)
        placement = place_layers(base, model)
        wrong = unproven_layers(base, model, placement.places)
        places = {name: place for name, place in placement.places.items() if name not in wrong}
        shared = {name: place for name, place in places.items() if specs[name].kind is LayerKind.SHARED}
        unread = unread_parameters(model, model_config, shared, device)
        rows = {name: place for name, place in places.items() if name not in shared}
        encoder = find_encoder_rules(model, model_config, specs, rows, device)
        self.refused: dict[str, str] = {
            **placement.unplaced,
            **wrong,
            **unread,
            **dict.fromkeys(encoder.out_of_reach, "vLLM's encoder call does not run it"),
        }
        self.absent = frozenset(placement.absent)
        self.rules = encoder.rules
        self.mixed = encoder.mixed
        self._tokens: Sequence[Adapter | None] = ()
        self._sampled: Sequence[Adapter | None] = ()
        self._group: tuple[Sequence[EncoderItem], Sequence[Adapter | None]] | None = None
        self._hidden: torch.Tensor | None = None
        self._routed = False
        self._model = model
        self._specs = specs
        self._places = {name: place for name, place in places.items() if name not in self.refused}
        wrap_modules(model, specs, self._places, self.rules, self.ctx, device)
        self._wrap_calls(model)

    def check_text_layers(self, run: Callable[[], Any], num_tokens: int) -> None:
        """Refuse text layers whose module does not see one row a token when `run` runs the text model on so many."""
        names = [name for name in self._places if self._is_text(name) and name != self._head]
        paths = {name: self._places[name].path for name in names}
        with record_calls(self._model, set(paths.values())) as calls, torch.inference_mode():
            run()
            if hasattr(self._model, "embed_input_ids"):
                self._model.embed_input_ids(torch.zeros(num_tokens, dtype=torch.long, device=self._device))
        for name, path in paths.items():
            fault = fault_of_calls(self._specs[name], calls[path], num_tokens)
            if fault is not None:
                self.refused[name] = fault
        logger.info("%d layers take adapters, %d do not", len(self._places), len(self.refused))

    def num_factor_features(self) -> int:
        """Inputs and outputs of all layers that take factors, the embedding aside: a rank costs as many values."""
        linear = (LayerKind.LINEAR, LayerKind.ROUTER, LayerKind.MATMUL, LayerKind.CONV)
        specs = [self._specs[name] for name in self._places if self._specs[name].kind in linear]
        return sum(spec.in_features + spec.out_features for spec in specs)

    def _is_text(self, name: str) -> bool:
        return self._specs[name].component is Component.LANGUAGE_MODEL

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
        embed, embed_ids = getattr(model, "embed_multimodal", None), getattr(model, "embed_input_ids", None)

        def routed_forward(*args: Any, **kwargs: Any) -> Any:
            with self._routing(self.ctx.text(_rows(self._tokens, _num_tokens(args, kwargs)), ())):
                self._hidden = forward(*args, **kwargs)
            return self._hidden

        def routed_logits(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with self._routing(self.ctx.text((), self._head_rows(hidden_states))):
                return compute_logits(hidden_states, *args, **kwargs)

        def routed_ids(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            assert embed_ids is not None
            if self._routed:  # inside another call, whose rows these are
                return embed_ids(input_ids, *args, **kwargs)
            with self._routing(self.ctx.text(_rows(self._tokens, input_ids.shape[0]), ())):
                return embed_ids(input_ids, *args, **kwargs)

        def routed_embed(**kwargs: Any) -> Any:
            assert embed is not None
            if self._group is None:
                with self._routing(self.ctx.whole(None)):
                    return by_item(embed(**kwargs))
            return by_item(self._embed(embed, kwargs, *self._group))

        model.forward = routed_forward
        model.compute_logits = routed_logits
        if embed_ids is not None:
            model.embed_input_ids = routed_ids
        if embed is not None:
            model.embed_multimodal = routed_embed

    @contextmanager
    def _routing(self, context: AbstractContextManager[None]) -> Iterator[None]:
        before, self._routed = self._routed, True
        try:
            with context:
                yield
        finally:
            self._routed = before

    def _head_rows(self, hidden_states: torch.Tensor) -> Any:
        """Segments of the rows that get logits: those sampled from, or, for logits of the prompt, a cut of the step's.

        vLLM gathers the rows it samples from, and cuts a prompt's out of what the text model put out.
        """
        first = _first_row(hidden_states, self._hidden)
        num_rows = hidden_states.shape[0]
        if first is None:
            return _rows(self._sampled, num_rows)
        return _rows(self._tokens[first : first + num_rows], num_rows)

    def _embed(
        self,
        embed: Callable[..., Any],
        kwargs: Mapping[str, Any],
        items: Sequence[EncoderItem],
        adapters: Sequence[Adapter | None],
    ) -> Any:
        if len(set(adapters)) == 1:
            with self._routing(self.ctx.whole(adapters[0])):  # all rows are its own, whatever the rules
                return embed(**kwargs)
        try:
            with self._routing(self.ctx.encoder([ItemSize.of(item) for item in items], adapters)):
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
                with self._routing(self.ctx.whole(adapter)):
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


def _first_row(rows: torch.Tensor, whole: torch.Tensor | None) -> int | None:
    """Which row of `whole` a cut of it begins with; None if it is no cut of it."""
    if not isinstance(whole, torch.Tensor) or rows.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        return None
    return int(rows.storage_offset() - whole.storage_offset()) // whole.stride(0)


def _num_tokens(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Rows of a text forward: its embeddings', or its token ids'."""
    for value in (kwargs.get("inputs_embeds"), kwargs.get("input_ids"), *args[:1]):
        if value is not None:
            return int(value.shape[0])
    raise RowRuleError("vLLM ran the text model with neither token ids nor embeddings")
