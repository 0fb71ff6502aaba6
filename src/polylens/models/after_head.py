"""What transformers' class does with the head's output before it returns it as logits.

Some classes multiply or divide it by an entry of the config, some cap it, some that have such an entry do neither
(LLaVA over a text model that does so alone): so it is found out by running the class's own forward over given
hidden states.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

Step = Callable[[Tensor], Tensor]
"""Logits (..., vocab) of the head -> those of the model."""

_FACTORS = ("logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier")
"""Config entries by which some class multiplies or divides logits."""
_CAP = "final_logit_softcapping"
_NUM_ROWS = 2


def after_head(model: Any) -> Step:
    """The step from the head's output to the model's logits.

    Where the class's forward cannot be run by itself, the cap of the config is taken, if it has any: a model that
    does something else is then not proven at load.
    """
    config = model.config.get_text_config()
    candidates = list(_candidates(config))
    if len(candidates) == 1:
        return candidates[0]
    try:
        given, returned = _head_and_forward(model)
        return min(candidates, key=lambda step: (step(given) - returned).abs().max().item())
    except Exception:  # the border to any architecture's code
        logger.debug("the forward of %s cannot be run alone", type(model).__name__, exc_info=True)
        return _capped(getattr(config, _CAP, None))


def _candidates(config: Any) -> Iterator[Step]:
    """Every step that the config allows; the plain one first, which is taken where others say the same."""
    yield _unchanged
    factors = [factor for name in _FACTORS if (factor := getattr(config, name, None)) not in (None, 1.0)]
    scales = [scale for factor in factors for scale in (_multiplied(factor), _divided(factor))]
    yield from scales
    if (cap := getattr(config, _CAP, None)) is not None:
        yield from (_in_turn(scale, _capped(cap)) for scale in (_unchanged, *scales))


def _unchanged(logits: Tensor) -> Tensor:
    return logits


def _multiplied(factor: float) -> Step:
    return lambda logits: logits * factor


def _divided(divisor: float) -> Step:
    return lambda logits: logits / divisor


def _capped(cap: float | None) -> Step:
    return _unchanged if cap is None else lambda logits: torch.tanh(logits / cap) * cap


def _in_turn(first: Step, second: Step) -> Step:
    return lambda logits: second(first(logits))


@torch.inference_mode()
def _head_and_forward(model: Any) -> tuple[Tensor, Tensor]:
    """The head's output and the forward's logits, both (1, rows, vocab), over the same hidden states."""
    head = model.get_output_embeddings()
    weight = head.weight
    noise = torch.randn(1, _NUM_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
    hidden = noise.to(weight.device, weight.dtype)
    with _given(model, hidden):
        returned = model(input_ids=torch.zeros(1, _NUM_ROWS, dtype=torch.long, device=weight.device))
    return head(hidden), returned.logits


@contextmanager
def _given(model: nn.Module, hidden: Tensor) -> Iterator[None]:
    """Let what lies below the head return `hidden`, whatever it is asked."""
    prefix: Any = model.base_model_prefix
    below = getattr(model, prefix)
    model._modules[prefix] = _Given(hidden)
    try:
        yield
    finally:
        model._modules[prefix] = below


class _Given(nn.Module):
    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, *_: Any, **__: Any) -> _Output:
        return _Output(self._hidden)


class _Output:
    """A model's output that has hidden states and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, _: str) -> None:
        return None
