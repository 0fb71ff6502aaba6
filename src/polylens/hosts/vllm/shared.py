"""Parameters of the tower that all items of an encoder call share: position embeddings, a class token.

An adapter that changes one runs its encoder calls alone, with its own parameter in the place of the base model's. That
takes a tower that reads the parameter when it runs, and keeps nothing made of it: found by putting another one there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from polylens.hosts.vllm.items import create_processor, encode, synthetic_batches
from polylens.lora.modules import with_parameters

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import ModelConfig

    from polylens.hosts.vllm.items import EncoderItem
    from polylens.hosts.vllm.placement import Place

logger = logging.getLogger(__name__)


def unread_parameters(
    model: nn.Module, model_config: ModelConfig, places: Mapping[str, Place], device: torch.device
) -> dict[str, str]:
    """Layers whose parameter has no effect on vLLM's encoder when it is exchanged -> why they take no change."""
    if not places:
        return {}
    try:
        with torch.inference_mode():
            items = [batch[0] for batch in synthetic_batches(create_processor(model_config)).values()]
            base = _features(model, items, device)
            return {
                name: "vLLM's encoder does not read it when it runs"
                for name, place in places.items()
                if torch.equal(base, _features_without(model, place, items, device))
            }
    except Exception as error:  # other people's code on noise: what could not be tried is refused
        logger.warning(
            "the tower's shared parameters could not be tried (%s: %s)",
            type(error).__name__,
            error,
            exc_info=logger.isEnabledFor(logging.DEBUG),
        )
        return dict.fromkeys(places, "vLLM's encoder could not be run on noise at start")


def _features(model: nn.Module, items: list[EncoderItem], device: torch.device) -> torch.Tensor:
    return torch.cat([encode(model, [item], device)[0].rows.flatten() for item in items])


def _features_without(model: nn.Module, place: Place, items: list[EncoderItem], device: torch.device) -> torch.Tensor:
    path, _, name = place.path.rpartition(".")
    owner = model.get_submodule(path)
    own = owner.get_parameter(name)
    other = own + torch.randn(own.shape, generator=torch.Generator().manual_seed(0)).to(own) * (own.std() + 1)
    with with_parameters(owner, {name: other}):
        return _features(model, items, device)
