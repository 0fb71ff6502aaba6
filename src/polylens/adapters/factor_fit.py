"""One pair of factors on the layer that it is for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polylens.adapters.layer_fit import LayerFit
from polylens.adapters.options import Refusal
from polylens.adapters.patterns import is_targeted
from polylens.core import FACTOR_KINDS, LayerKind

if TYPE_CHECKING:
    import torch

    from polylens.adapters.options import LoraOptions
    from polylens.adapters.pairs import FactorPair
    from polylens.core import LayerSpec


def factors_refusal(pair: FactorPair, spec: LayerSpec) -> Refusal | None:
    """Factors of a kind that the layer's kind does not take."""
    if spec.kind not in FACTOR_KINDS:
        what = "a parameter of the whole tower" if spec.kind is LayerKind.SHARED else "a norm"
        return Refusal("target_modules", f"{pair.module} is {what}, which takes no factors")
    if pair.magnitude is not None and spec.kind is LayerKind.MATMUL:
        return Refusal("use_dora", f"{pair.module}: DoRA is not defined for a bare parameter")
    if pair.bias is not None and spec.kind in (LayerKind.MATMUL, LayerKind.EMBEDDING):
        return Refusal("lora_bias", f"{pair.module} has no bias")
    return None


def fit_factors(pair: FactorPair, spec: LayerSpec, options: LoraOptions) -> tuple[LayerFit | None, str]:
    """The pair on its layer, or why it does not fit."""
    if wrong := _kind_problem(pair, spec):
        return None, wrong
    a, b = _turned(pair, spec)
    if a.shape[1] != spec.in_features or b.shape[0] != spec.out_features:
        return None, (
            f"{pair.module}: the file's factors are for {a.shape[1]} inputs and {b.shape[0]} outputs, "
            f"the model's layer has {spec.in_features} and {spec.out_features}"
        )
    trained_name = _trained_name(pair, spec, options)
    if wrong := _rank_problem(pair, trained_name, options) or _extras_problem(pair, spec, options):
        return None, wrong
    magnitude = None if pair.magnitude is None else pair.magnitude.flatten()
    return LayerFit(spec, trained_name, a, b, options.scaling_of(trained_name), magnitude, pair.bias), ""


def _kind_problem(pair: FactorPair, spec: LayerSpec) -> str | None:
    """Factors of a convolution or an embedding must be for one."""
    if pair.a.dim() > 2 and spec.kind is not LayerKind.CONV:
        return f"{pair.module} has factors of a convolution, the model's layer {spec.name} is none"
    if pair.a.dim() > 2 and pair.b[0, 0].numel() != 1:
        return f"{pair.module}: lora_B {tuple(pair.b.shape)} is no 1 x 1 convolution"
    if pair.embedding != (spec.kind is LayerKind.EMBEDDING):
        return f"{pair.module}: factors of {'an' if pair.embedding else 'no'} embedding, on a {spec.kind} layer"
    return None


def _turned(pair: FactorPair, spec: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """A (rank, in) and B (out, rank) of the layer."""
    if spec.kind is LayerKind.MATMUL:
        # PEFT reads a 2-D parameter as (out, in), so for one used as y = x W, W (in, out), its delta B A is W's:
        # x (B A) = ((x B) A): our a is Bᵀ and our b is Aᵀ.
        return pair.b.T.contiguous(), pair.a.T.contiguous()
    return pair.a.flatten(1), pair.b.flatten(1)


def _trained_name(pair: FactorPair, spec: LayerSpec, options: LoraOptions) -> str:
    """What PEFT matches patterns against: of a bare parameter its own path, not that of the module that owns it."""
    if spec.kind is LayerKind.MATMUL:
        return f"{pair.module}.{spec.parameter}"
    as_parameter = f"{pair.module}.weight"
    if spec.kind is LayerKind.ROUTER and is_targeted(options.target_parameters, as_parameter):
        return as_parameter
    return pair.module


def _rank_problem(pair: FactorPair, trained_name: str, options: LoraOptions) -> str | None:
    rank = options.rank_of(trained_name)
    overlap = len(options.ranks.matching(trained_name))
    if overlap > 1 and pair.method != "LORA" and pair.given_rank is None:
        return f"{pair.module}: {overlap} entries of rank_pattern match it, and its tensors do not show the rank"
    if not pair.has_rank(rank):
        why = f" ({overlap} entries of rank_pattern match it)" if overlap > 1 else ""
        return f"{pair.module}: rank {pair.told_rank} in the file, {rank} in adapter_config.json{why}"
    return None


def _extras_problem(pair: FactorPair, spec: LayerSpec, options: LoraOptions) -> str | None:
    """Magnitude and bias of B must be there exactly if the config says so, one value an output."""
    for option, name, wanted, value, without in (
        ("use_dora", "lora_magnitude_vector", options.use_dora, pair.magnitude, (LayerKind.MATMUL,)),
        ("lora_bias", "lora_B.bias", options.lora_bias, pair.bias, (LayerKind.MATMUL, LayerKind.EMBEDDING)),
    ):
        if spec.kind in without:
            continue
        if wanted != (value is not None):
            return f"{pair.module} has {'no' if wanted else 'a'} {name}, but {option} is {str(wanted).lower()}"
        if value is not None and value.numel() != spec.out_features:
            return f"{pair.module}: {name} has {value.numel()} values, the model's layer {spec.out_features} outputs"
    return None
