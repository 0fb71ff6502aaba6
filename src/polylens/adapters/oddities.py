"""What is odd about an adapter, but changes nothing of what is applied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polylens.adapters.patterns import ALL_LINEAR, is_targeted, pattern_fault
from polylens.core import LayerKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from polylens.adapters.layer_fit import LayerFit
    from polylens.adapters.options import LoraOptions
    from polylens.core import ModelLayers


def oddities(fits: Sequence[LayerFit], options: LoraOptions, layers: ModelLayers) -> tuple[str, ...]:
    """A line for each, about what has been found to fit."""
    factored = [fit for fit in fits if fit.rank]
    lines = (
        _other_base(options, layers),
        _other_value("rank_pattern", options.rank_of, factored),
        _other_value("alpha_pattern", options.alpha_of, factored),
        _several_alphas(factored, options),
        _no_targets(factored, options),
        _deltas_of_zero(factored),
    )
    return tuple(line for line in lines if line is not None)


def _other_base(options: LoraOptions, layers: ModelLayers) -> str | None:
    if not layers.source or not options.base_model or _last_part(options.base_model) == _last_part(layers.source):
        return None
    return f"its config says it was trained on {options.base_model}; everything fits this model, {layers.source}"


def _last_part(path: str) -> str:
    """A model's name without where it lies: folders and organisations differ between trainers and servers."""
    return path.rstrip("/").rpartition("/")[2].lower()


def _other_value(option: str, value_of: Callable[[str], float], factored: Sequence[LayerFit]) -> str | None:
    """A layer for which the pattern says something else under its name in this model."""
    for fit in factored:
        if value_of(fit.spec.name) != value_of(fit.trained_name):
            return (
                f"{option} gives {fit.spec.name} another value than {fit.trained_name}, its name in the file; "
                "the name in the file counts"
            )
    return None


def _several_alphas(factored: Sequence[LayerFit], options: LoraOptions) -> str | None:
    for fit in factored:
        if len(set(values := options.alphas.matching(fit.trained_name))) > 1:
            # PEFT sorts patterns when it saves, so which one came first in training is lost.
            return f"{len(values)} entries of alpha_pattern match {fit.trained_name}; the first in the file counts"
    return None


def _no_targets(factored: Sequence[LayerFit], options: LoraOptions) -> str | None:
    target = options.target_modules
    if not target or target == ALL_LINEAR or (isinstance(target, str) and pattern_fault(target)):
        return None
    linear = [fit.trained_name for fit in factored if fit.spec.kind is LayerKind.LINEAR]
    missed = [name for name in linear if not is_targeted(target, name)]
    return f"target_modules does not name {len(missed)} layers that have tensors, e.g. {missed[0]}" if missed else None


def _deltas_of_zero(factored: Sequence[LayerFit]) -> str | None:
    silent = [fit.spec.name for fit in factored if _is_zero(fit)]
    return f"{len(silent)} layers have a delta of zero, e.g. {silent[0]}" if silent else None


def _is_zero(fit: LayerFit) -> bool:
    if fit.magnitude is not None or fit.lora_bias is not None or fit.values:
        return False
    return not bool(fit.b.any()) or not bool(fit.a.any()) or fit.scaling == 0
