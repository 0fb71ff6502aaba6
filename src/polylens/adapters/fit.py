"""Does an adapter fit a model? Pairs of factors to layers, every tensor accounted for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from polylens.adapters.names import Found, LayerNames
from polylens.adapters.options import Refusal
from polylens.adapters.pairs import FactorPair, pair_tensors
from polylens.adapters.patterns import ALL_LINEAR, is_targeted, num_values, pattern_fault
from polylens.core import LayerKind
from polylens.errors import AdapterMismatchError, AdapterUnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from polylens.adapters.options import LoraOptions
    from polylens.core import LayerSpec, ModelLayers

MAX_SHOWN_PROBLEMS = 4
"""Problems named in an error's one line; its `problems` holds all."""


@dataclass(frozen=True, eq=False)
class LayerFit:
    """One layer with the factors the file has for it, turned to the layer's own sides.

    a: (rank, in_features), b: (out_features, rank), in the file's dtype on the CPU.
    trained_name: what PEFT matched patterns against when the adapter was trained.
    """

    spec: LayerSpec
    trained_name: str
    a: torch.Tensor
    b: torch.Tensor
    scaling: float


@dataclass(frozen=True, eq=False)
class Fit:
    """What of an adapter fits, and everything that does not."""

    layers: tuple[LayerFit, ...]
    problems: tuple[str, ...]
    unsupported: tuple[Refusal, ...]
    warnings: tuple[str, ...]


def fit_adapter(tensors: Mapping[str, torch.Tensor], options: LoraOptions, layers: ModelLayers) -> Fit:
    """Match every tensor to a layer of the model. Raises nothing: see `require_fit`."""
    paired = pair_tensors(tensors)
    names = LayerNames(layers)
    problems = list(paired.problems)
    unsupported = list(paired.unsupported)
    fits: dict[str, LayerFit] = {}
    for pair in paired.pairs:
        found = names.find(pair.module)
        if not isinstance(found, Found):
            if found.module_type is not None:
                unsupported.append(Refusal("target_modules", found.reason))
            else:
                problems.append(found.reason)
            continue
        fit, wrong = _fit_layer(pair, found.spec, options)
        if fit is None:
            problems.append(wrong)
        elif fit.spec.name in fits:
            problems.append(f"{fits[fit.spec.name].trained_name} and {pair.module} are the same layer {fit.spec.name}")
        else:
            fits[fit.spec.name] = fit
    if options.fan_in_fan_out and any(fit.spec.kind is LayerKind.MATMUL for fit in fits.values()):
        # PEFT raises as well. For linear layers it ignores the option, and so do we: it is about Conv1D weights.
        unsupported.append(Refusal("fan_in_fan_out", "not defined for a bare parameter"))
    ordered = tuple(fits[name] for name in layers.specs if name in fits)
    return Fit(ordered, tuple(problems), tuple(unsupported), _warnings(ordered, options))


def require_fit(fit: Fit, source: str, options: LoraOptions, layers: ModelLayers) -> None:
    """Raise if anything of the adapter would be left out.

    Raises AdapterUnsupportedError (tensors of an option that is not applied), AdapterMismatchError (all else).
    """
    if fit.unsupported:
        listed = _listed([f"{refusal.option}: {refusal.reason}" for refusal in fit.unsupported])
        raise AdapterUnsupportedError(f"adapter {source!r} is not supported: {listed}", fit.unsupported[0].option)
    if fit.problems:
        made_for = f"; it was made for {options.base_model!r}" if options.base_model else ""
        other = "" if fit.layers else "; nothing of it fits, so it seems made for another base model"
        raise AdapterMismatchError(
            f"adapter {source!r} does not fit this {layers.model_type} model ({layers.model_class}): "
            f"{_listed(fit.problems)}{other}{made_for}",
            fit.problems,
        )


def _listed(problems: Sequence[str]) -> str:
    shown = "; ".join(problems[:MAX_SHOWN_PROBLEMS])
    left = len(problems) - MAX_SHOWN_PROBLEMS
    return f"{shown}; and {left} more" if left > 0 else shown


def _fit_layer(pair: FactorPair, spec: LayerSpec, options: LoraOptions) -> tuple[LayerFit | None, str]:
    """The pair on its layer, or why it does not fit."""
    a, b, trained_name = pair.a, pair.b, pair.module
    if spec.kind is LayerKind.MATMUL:
        # PEFT reads a 2-D parameter as (out, in), so for one used as y = x W, W (in, out), its delta B A is W's:
        # x (B A) = ((x B) A): our a is Bᵀ and our b is Aᵀ. Patterns are matched against the parameter's path.
        a, b = pair.b.T.contiguous(), pair.a.T.contiguous()
        trained_name = f"{pair.module}.{spec.name.rpartition('.')[2]}"
    if a.shape[1] != spec.in_features or b.shape[0] != spec.out_features:
        return None, (
            f"{pair.module}: the file's factors are for {a.shape[1]} inputs and {b.shape[0]} outputs, "
            f"the model's layer has {spec.in_features} and {spec.out_features}"
        )
    rank = options.rank_of(trained_name)
    if a.shape[0] != rank:
        overlap = num_values(options.rank_pattern, trained_name)
        why = f" ({overlap} entries of rank_pattern match it)" if overlap > 1 else ""
        return None, f"{pair.module}: rank {a.shape[0]} in the file, {rank} in adapter_config.json{why}"
    return LayerFit(spec, trained_name, a, b, options.scaling_of(trained_name)), ""


def _warnings(fits: tuple[LayerFit, ...], options: LoraOptions) -> tuple[str, ...]:
    """Things that are odd but change nothing of what is applied."""
    found = []
    names = {fit.spec.name: fit.trained_name for fit in fits}
    for option, value_of in (("rank_pattern", options.rank_of), ("alpha_pattern", options.alpha_of)):
        if differing := [name for name, trained in names.items() if value_of(name) != value_of(trained)]:
            found.append(
                f"{option} gives {differing[0]} another value than {names[differing[0]]}, its name in the file; "
                "the name in the file counts"
            )
    for name in names.values():
        if (overlap := num_values(options.alpha_pattern, name)) > 1:
            # PEFT sorts patterns when it saves, so which one came first in training is lost.
            found.append(f"{overlap} entries of alpha_pattern match {name}; the first in the file counts")
            break
    target = options.target_modules
    if target and target != ALL_LINEAR and not (isinstance(target, str) and pattern_fault(target)):
        linear = [fit.trained_name for fit in fits if fit.spec.kind is LayerKind.LINEAR]
        if missed := [name for name in linear if not is_targeted(target, name)]:
            found.append(f"target_modules does not name {len(missed)} layers that have tensors, e.g. {missed[0]}")
    silent = [fit.spec.name for fit in fits if not bool(fit.b.any()) or not bool(fit.a.any()) or fit.scaling == 0]
    if silent:
        found.append(f"{len(silent)} layers have a delta of zero, e.g. {silent[0]}")
    return tuple(found)
