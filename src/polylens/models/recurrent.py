"""Layers that carry a state from token to token: linear attention (Qwen3.5), short convolutions (LFM2).

On a flattened batch the modules that hold the state (*mixers*) must see each sequence with its own state; all
else of their layers works on single tokens and needs nothing. So the mixers' forward is replaced: rows are cut by
sequence, sequences that decode run as one batch, and the others (prefill chunks) one after the other. The state
itself is what transformers' own cache holds of such layers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicLayer, LinearAttentionCacheLayerMixin

from polylens.errors import InternalError, ModelLoadError
from polylens.models.attention import RaggedBatch, SequenceRows

_STATES = ("conv_states", "recurrent_states")
"""Where transformers' cache layers keep tensors (1, ...), by number of the state; None for one not in use."""


class CarriedState:
    """What the mixers of a text model remember of the first `num_tokens` tokens of one sequence.

    num_tokens is None while a step changes the state: a step that failed leaves it so, and it is never used again.
    """

    def __init__(self, text_config: Any) -> None:
        self.cache = DynamicCache(config=text_config)
        self.num_tokens: int | None = 0

    @property
    def num_bytes(self) -> int:
        layers = [layer for layer in self.cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
        tensors = [state for layer in layers for name in _STATES for state in getattr(layer, name).values()]
        return sum(x.numel() * x.element_size() for x in tensors if x is not None)

    @contextmanager
    def advanced(self, start: int, stop: int) -> Iterator[None]:
        """Around the step that computes tokens [start, stop). Raises InternalError unless the state ends at `start`."""
        if self.num_tokens != start:
            raise InternalError(f"a carried state of {self.num_tokens} tokens cannot go on at token {start}")
        self.num_tokens = None
        yield
        self.num_tokens = stop


def wrap_mixers(text: nn.Module) -> int:
    """Make the mixers of a text model work on ragged batches; returns how many there are.

    Calls without a ragged batch run as before. Raises ModelLoadError for layers that have both a state and
    attention, and for layers with a state in which no mixer is found.
    """
    layers: Any = getattr(text, "layers", ())
    kinds = getattr(text.config, "layer_types", None) or ()
    carrying = [index for index, kind in enumerate(kinds[: len(layers)]) if _carries_state(kind)]
    mixers = [_mixer(layers[index], index, kinds[index]) for index in carrying]
    for mixer in mixers:
        if not isinstance(getattr(mixer.forward, "__self__", None), _RaggedMixer):
            mixer.forward = _RaggedMixer(mixer).forward
    return len(mixers)


def _carries_state(kind: str) -> bool:
    return issubclass(DYNAMIC_LAYER_TYPE_MAPPING.get(kind, object), LinearAttentionCacheLayerMixin)


def attends_and_carries_state(kind: str) -> bool:
    """Whether layers of the kind keep keys and values beside their state."""
    return _carries_state(kind) and issubclass(DYNAMIC_LAYER_TYPE_MAPPING[kind], DynamicLayer)


def _mixer(layer: nn.Module, index: int, kind: str) -> nn.Module:
    """The innermost module that knows its layer's number and takes a cache."""
    found = [
        m for m in layer.modules() if m is not layer and _takes_cache(m) and getattr(m, "layer_idx", None) == index
    ]
    if len(found) != 1:
        names = ", ".join(type(module).__name__ for module in found) or "none"
        raise ModelLoadError(f"text layer {index} ({kind}) should have one module with a state, found: {names}")
    return found[0]


def _takes_cache(module: nn.Module) -> bool:
    return "cache" in inspect.signature(type(module).forward).parameters


class _RaggedMixer:
    """A mixer's forward, for calls with and without a ragged batch."""

    def __init__(self, mixer: nn.Module) -> None:
        self._base: Callable[..., torch.Tensor] = mixer.forward
        self._layer = int(mixer.layer_idx)  # type: ignore[arg-type]

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, polylens_batch: RaggedBatch | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """(1, t, d) -> (1, t, d)."""
        if polylens_batch is None:
            return self._base(hidden_states, *args, **kwargs)
        if args or any(isinstance(value, torch.Tensor | tuple) for value in kwargs.values()):
            raise InternalError(f"text layer {self._layer} gives its mixer more than hidden states")
        return self._ragged(hidden_states, polylens_batch)

    def _ragged(self, x_1td: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        out_1td = torch.empty_like(x_1td)
        decoding = [(rows, state) for rows, state in _pairs(batch) if _decodes(rows)]
        if decoding:
            rows_b = torch.tensor([rows.start for rows, _ in decoding], device=x_1td.device)
            with batch.only_rows([(rows.start, rows.stop) for rows, _ in decoding]):
                out_1td[0, rows_b] = self._decode(x_1td[0, rows_b, None], [state for _, state in decoding])[:, 0]
        for rows, state in _pairs(batch):
            if not _decodes(rows):
                with batch.only_rows([(rows.start, rows.stop)]):
                    part = self._base(x_1td[:, rows.start : rows.stop], cache=state.cache)
                out_1td[:, rows.start : rows.stop] = part
        return out_1td

    def _decode(self, x_b1d: torch.Tensor, states: Sequence[CarriedState]) -> torch.Tensor:
        """One token of each sequence: (b, 1, d) -> (b, 1, d); the states advance."""
        layers = [state.cache.layers[self._layer] for state in states]
        joined = copy.copy(states[0].cache)
        joined.layers = list(joined.layers)
        joined.layers[self._layer] = _join(layers)
        out_b1d = self._base(x_b1d, cache=joined)
        _divide(joined.layers[self._layer], layers)
        return out_b1d


def _pairs(batch: RaggedBatch) -> Iterator[tuple[SequenceRows, CarriedState]]:
    return zip(batch.sequences, batch.carried, strict=True)


def _decodes(rows: SequenceRows) -> bool:
    return rows.num_rows == 1 and rows.first_position > 0


def _join(layers: Sequence[Any]) -> Any:
    """One cache layer with the states of all, along the batch dimension."""
    joined = copy.copy(layers[0])
    for name in _STATES:
        numbered = getattr(joined, name).items()
        states = {i: None if x is None else torch.cat([getattr(one, name)[i] for one in layers]) for i, x in numbered}
        setattr(joined, name, states)
    return joined


def _divide(joined: Any, layers: Sequence[Any]) -> None:
    """Write the joined states back, in place."""
    for name in _STATES:
        for number, states in getattr(joined, name).items():
            if states is not None:
                torch._foreach_copy_([getattr(one, name)[number] for one in layers], list(states.split(1)))
