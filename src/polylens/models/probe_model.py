"""Row rules of a loaded model: from the cache, or by probing a stand-in for its encoder."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from polylens.models.encoder import encode
from polylens.models.parts import picture_encoder
from polylens.models.probe import ProbeResult, probe_row_rules
from polylens.models.probe_cache import ProbeCache
from polylens.models.probe_copy import (
    MAX_UNCUT_PARAMETERS,
    carry_over,
    copy_for_probe,
    encoder_layers,
    probe_layers,
)
from polylens.models.probe_items import synthetic_items
from polylens.models.row_rules import RowRule

if TYPE_CHECKING:
    from polylens.models.loading import LoadedModel

logger = logging.getLogger(__name__)

_NOT_ARCHITECTURE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Config entries that say where a checkpoint came from, not what is computed."""


NOTHING_TO_DIVIDE = ProbeResult({}, noise_floor=0.0, worst_error=0.0, contrast=math.inf)
"""For a model without an encoder, and for one whose forwards hold one request's rows alone."""


def find_row_rules(
    loaded: LoadedModel, *, cache_dir: Path | None = None, max_parameters: int = MAX_UNCUT_PARAMETERS
) -> ProbeResult:
    """The row rule of every adaptable layer outside the language model.

    cache_dir: where results are kept (default: as `disk_cache`). max_parameters: encoders beyond it are
    probed on a copy with fewer blocks.
    """
    if loaded.is_hosted:
        return replace(NOTHING_TO_DIVIDE, unreachable=_never_called(loaded))
    if not encoder_layers(loaded.layers):
        return NOTHING_TO_DIVIDE
    cache = ProbeCache(cache_dir)
    facts = _facts(loaded, max_parameters)
    known = cache.load(facts, encoder_layers(loaded.layers))
    if known is not None:
        return known
    result = _probe_or_give_up(loaded, max_parameters)
    if result is not None:
        cache.store(facts, result)
        return result
    return _unproven(loaded)


def _never_called(loaded: LoadedModel) -> tuple[str, ...]:
    """Layers whose weight other code reads, which takes no probe to tell: the last ones of torch's own attention."""
    parts = loaded.model.named_modules()
    named = (f"{name}.out_proj" for name, module in parts if isinstance(module, nn.MultiheadAttention))
    return tuple(name for name in named if name in loaded.layers.specs)


def _facts(loaded: LoadedModel, max_parameters: int) -> Mapping[str, Any]:
    """What a result depends on, besides the probe itself."""
    tower: Any = picture_encoder(loaded.model)
    attention = tower.config._attn_implementation
    more = {"attention": attention, "dtype": str(loaded.dtype), "max_parameters": max_parameters}
    return {**model_facts(loaded), **more}


def model_facts(loaded: LoadedModel) -> dict[str, Any]:
    """What a model computes of pictures and text, apart from its weights, as JSON values."""
    return {
        "config": architecture(loaded.config.to_dict()),
        "class": type(loaded.model).__qualname__,
        "transformers": transformers.__version__,
        "processors": {name: _settings(loaded, name) for name in ("image_processor", "video_processor")},
    }


def _settings(loaded: LoadedModel, name: str) -> dict[str, Any] | None:
    """Of one part of the processor, as it saves them."""
    processor = getattr(loaded.processing.processor, name, None)
    return None if processor is None else processor.to_dict()


def architecture(config: Any) -> Any:
    """A config without the entries that say where a checkpoint came from."""
    if isinstance(config, dict):
        return {name: architecture(value) for name, value in config.items() if name not in _NOT_ARCHITECTURE}
    return config


def _probe_or_give_up(loaded: LoadedModel, max_parameters: int) -> ProbeResult | None:
    """The probe is a border to any architecture's code, run on a config changed by us and on noise.

    Where that code fails, nothing is known and nothing is guessed: the failure is logged and every layer stays
    unproven, which is slower and never wrong.
    """
    try:
        return _probe(loaded, max_parameters)
    except Exception as error:
        logger.warning(
            "row rules could not be probed (%s: %s): the encoder will run one adapter at a time",
            type(error).__name__,
            error,
            exc_info=logger.isEnabledFor(logging.DEBUG),
        )
        return None


def _unproven(loaded: LoadedModel) -> ProbeResult:
    names = encoder_layers(loaded.layers)
    reasons = dict.fromkeys(names, "the model could not be probed")
    return ProbeResult(dict.fromkeys(names, RowRule.UNPROVEN), math.nan, math.nan, math.inf, reasons)


def _probe(loaded: LoadedModel, max_parameters: int) -> ProbeResult:
    probed = copy_for_probe(loaded.model, loaded.layers, max_parameters=max_parameters)
    inner = probed.model.base_model
    result = probe_row_rules(
        lambda items: encode(inner, items, dtype=torch.float32, notes=loaded.notes),
        synthetic_items(loaded.processing),
        probe_layers(probed.model, probed.layers),
    )
    return carry_over(encoder_layers(loaded.layers), result, loaded.model, probed)
