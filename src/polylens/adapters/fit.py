"""Does an adapter fit a model? The file's tensors to layers, every tensor accounted for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from polylens.adapters.base_parameters import (
    expected_shape,
    is_copy,
    is_of_tokens,
    is_own_parameter,
    num_tokens,
    tied_heads,
    tied_layers,
)
from polylens.adapters.completeness import missing_biases, missing_modules, missing_tokens
from polylens.adapters.experts import fit_experts, join_experts
from polylens.adapters.factor_fit import factors_refusal, fit_factors
from polylens.adapters.fused import join_parts, split_whole
from polylens.adapters.layer_fit import LayerFit
from polylens.adapters.names import Found, LayerNames
from polylens.adapters.oddities import oddities
from polylens.adapters.options import DEFAULT_EMBEDDING, Refusal
from polylens.adapters.pairs import pair_tensors
from polylens.core import BARE_KINDS, EXPERT_KINDS, LayerKind
from polylens.errors import AdapterMismatchError, AdapterUnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from polylens.adapters.options import LoraOptions
    from polylens.adapters.pairs import FactorPair, PairedTensors, TrainedTokens, WholeTensor
    from polylens.core import LayerSpec, ModelLayers

MAX_SHOWN_PROBLEMS = 4
"""Problems named in an error's one line; its `problems` holds all."""


@dataclass(frozen=True, eq=False)
class Fit:
    """What of an adapter fits, and everything that does not."""

    layers: tuple[LayerFit, ...]
    problems: tuple[str, ...]
    unsupported: tuple[Refusal, ...]
    warnings: tuple[str, ...]
    num_copies: int = 0
    """Tensors that are the base model's own, repeat others of the file, or have no part in a text model alone."""


def fit_adapter(tensors: Mapping[str, torch.Tensor], options: LoraOptions, layers: ModelLayers) -> Fit:
    """Match every tensor to a layer of the model. Raises nothing: see `require_fit`."""
    return _Fitting(options, layers).run(tensors)


class _Fitting:
    """One run of `fit_adapter`: what has been found so far."""

    def __init__(self, options: LoraOptions, layers: ModelLayers) -> None:
        self._options = options
        self._layers = layers
        self._names = LayerNames(layers)
        self._fits: dict[str, LayerFit] = {}
        self._problems: list[str] = []
        self._unsupported: list[Refusal] = []
        self._num_copies = 0
        self._warnings: list[str] = []
        self._with_bias: set[str] = set()

    def run(self, tensors: Mapping[str, torch.Tensor]) -> Fit:
        paired = self._without_vision(pair_tensors(tensors))
        self._problems += paired.problems
        self._unsupported += paired.unsupported
        self._num_copies += paired.num_repeated
        self._check_method(paired.pairs)
        experts, wrong_experts, pairs = join_experts(paired.pairs, self._options, self._names.experts)
        joined, wrong_parts, pairs = join_parts(pairs, self._options, self._names.layer)
        self._problems += wrong_experts + wrong_parts
        for fit in experts + joined:
            self._fits[fit.spec.name] = fit
        for pair in pairs:
            self._add_pair(pair)
        for part in paired.whole:
            self._add_whole(part)
        for tokens in paired.tokens:
            self._add_tokens(tokens)
        self._tie_heads()
        self._check_vocabulary()
        self._check_complete(paired)
        self._check_orientation()
        ordered = tuple(self._fits[name] for name in self._layers.specs if name in self._fits)
        warnings = (*self._warnings, *oddities(ordered, self._options, self._layers))
        return Fit(ordered, tuple(self._problems), tuple(self._unsupported), warnings, self._num_copies)

    def _without_vision(self, paired: PairedTensors) -> PairedTensors:
        """On a text model alone: without the tensors of a tower and connector, which no request can reach there."""
        absent = self._names.is_of_missing_vision
        pairs = tuple(pair for pair in paired.pairs if not absent(pair.module))
        whole = tuple(part for part in paired.whole if not absent(part.module))
        num_left_out = sum(len(pair.names) for pair in paired.pairs) - sum(len(pair.names) for pair in pairs)
        num_left_out += len(paired.whole) - len(whole)
        if num_left_out:
            self._num_copies += num_left_out
            self._warnings.append(f"{num_left_out} tensors are for a vision part, which this text model does not have")
        if num_left_out and not (pairs or whole or paired.tokens):
            self._problems.append("its tensors are only for a vision part, which this text model does not have")
        return replace(paired, pairs=pairs, whole=whole)

    def _check_method(self, pairs: Sequence[FactorPair]) -> None:
        """The tensors must be those of the method that the config names: its scaling is for them."""
        other = next((pair for pair in pairs if pair.method != self._options.peft_type), None)
        if other is not None:
            self._problems.append(
                f"{other.module} has tensors of {other.method}, and adapter_config.json says {self._options.peft_type}"
            )

    def _spec_of(self, module: str, option: str, parameter: str | None = None) -> LayerSpec | None:
        """The layer of a module path; None, and why is noted, where there is none. parameter: which of the experts'."""
        found = self._names.find(module)
        if isinstance(found, Found):
            named = [spec for spec in found.parameters if spec.parameter == parameter]
            return named[0] if named else found.spec
        if found.module_type is not None:
            self._unsupported.append(Refusal(option, found.reason))
        else:
            self._problems.append(found.reason)
        return None

    def _add_pair(self, pair: FactorPair) -> None:
        if self._names.layer(pair.module) is None and (parts := split_whole(pair, self._names.layer)):
            for index, (part, part_spec) in enumerate(parts):
                self._add_fit(part, part_spec, num_tensors=2 if index == 0 else 0)
            return
        spec = self._spec_of(pair.module, "target_modules")
        if spec is None:
            return
        if spec.kind in EXPERT_KINDS:
            self._keep(pair, *fit_experts(pair, self._names.experts(pair.module), self._options), len(pair.names))
            return
        if refusal := factors_refusal(pair, spec):
            self._unsupported.append(refusal)
            return
        self._add_fit(pair, spec, len(pair.names) or 2)

    def _add_fit(self, pair: FactorPair, spec: LayerSpec, num_tensors: int) -> None:
        self._keep(pair, *fit_factors(pair, spec, self._options), num_tensors)

    def _keep(self, pair: FactorPair, fit: LayerFit | None, wrong: str, num_tensors: int) -> None:
        if fit is None:
            self._problems.append(wrong)
        elif (name := fit.spec.name) in self._fits:
            self._problems.append(f"{self._fits[name].trained_name} and {pair.module} are the same layer {name}")
        else:
            self._fits[name] = replace(fit, num_tensors=num_tensors)

    def _add_whole(self, part: WholeTensor) -> None:
        if is_own_parameter(part, self._names, self._layers):
            # Of no layer, so it cannot be applied and need not be: buffers of a saved router, say.
            self._num_copies += 1
        elif spec := self._spec_of(part.module, "modules_to_save", part.parameter):
            self._add_parameter(part, spec, "weight" if spec.kind in BARE_KINDS else part.parameter)

    def _add_parameter(self, part: WholeTensor, spec: LayerSpec, role: str) -> None:
        if wrong := self._parameter_problem(part, spec, role):
            self._problems.append(wrong)
            return
        if role == "bias":
            self._with_bias.add(spec.name)
        fit = self._fits.get(spec.name, LayerFit.empty(spec, part.module))
        if role in fit.values:
            self._problems.append(f"{part.name}: the {role} of {spec.name} is in the file under another name as well")
        elif is_copy(part.value, own := self._layers.parameters[spec.state_name(role)]):
            # PEFT saves the head's and the embeddings' own weights beside their factors, and with bias="all" the
            # biases of layers that were not trained.
            self._num_copies += 1
        elif self._may_be_of_either(part, spec, role):
            self._check_untrained(part, own)
        else:
            values = {**fit.values, role: part.value}
            self._fits[spec.name] = replace(fit, values=values, num_tensors=fit.num_tensors + 1)

    def _parameter_problem(self, part: WholeTensor, spec: LayerSpec, role: str) -> str | None:
        expected, shape = expected_shape(spec, role, self._layers), tuple(part.value.shape)
        if spec.kind in BARE_KINDS and part.parameter != spec.parameter:
            return f"{part.name}: {part.module} has no such parameter that polylens can replace"
        if expected is None:
            return f"{part.name}: the model's layer {spec.name} has no {part.parameter}"
        if shape == expected or self._has_more_tokens(spec, role, part.value, expected):
            return None
        of_tokens = f": the adapter is for {shape[0]} tokens, the model has {expected[0]}" if is_of_tokens(spec) else ""
        return f"{part.name} has shape {shape}, the model's layer {expected}{of_tokens}"

    def _may_be_of_either(self, part: WholeTensor, spec: LayerSpec, role: str) -> bool:
        """Whether it may be for the embedding as well as for the head, which have one weight in the model."""
        same_shape = tuple(part.value.shape) == expected_shape(spec, role, self._layers)
        tied = role == "weight" and spec.name in tied_layers(self._layers)
        return same_shape and tied and not self._is_saved(part.module)

    def _check_untrained(self, part: WholeTensor, own: torch.Tensor) -> None:
        """A weight of tied layers that the config does not say to be trained must be the model's own."""
        if own.is_meta:
            self._warnings.append(f"{part.name} must be the model's own, which is not seen without the model's weights")
            self._num_copies += 1
        elif is_copy(own.to(part.value.dtype).cpu(), part.value):
            self._num_copies += 1  # rounded when it was saved
        else:
            self._problems.append(
                f"{part.name} is not the model's own and not in modules_to_save; as head and embedding are tied, "
                "which of them it is for cannot be told"
            )

    def _has_more_tokens(self, spec: LayerSpec, role: str, value: torch.Tensor, expected: tuple[int, ...]) -> bool:
        """Whether it is an embedding or a head of the model's tokens and of further ones, and those can be served."""
        taller = value.dim() == 2 and value.shape[0] > expected[0] and value.shape[1] == expected[-1]
        return self._layers.more_tokens and is_of_tokens(spec) and role == "weight" and taller

    def _check_vocabulary(self) -> None:
        """Where the adapter brings tokens, embedding and head must both have them, and factors on neither."""
        own = {spec.name: num_tokens(spec) for spec in self._layers.specs.values() if is_of_tokens(spec)}
        fits = {name: fit for name, fit in self._fits.items() if name in own and "weight" in fit.values}
        sizes = {**own, **{name: fit.values["weight"].shape[0] for name, fit in fits.items()}}
        more = [name for name, size in sizes.items() if size > own[name]]
        if not more:
            return
        if len(sizes) < 2 or len(set(sizes.values())) > 1:
            listed = " and ".join(f"{name} for {size}" for name, size in sizes.items())
            self._problems.append(f"embedding and head would not have the same tokens: {listed}")
        self._problems += [
            f"{name} has factors for {own[name]} tokens, of {sizes[name]}" for name in more if fits[name].rank
        ]

    def _tie_heads(self) -> None:
        """With `ensure_weight_tying`, a head tied to the embedding changes with it, whether the file has it or not."""
        if not self._options.ensure_weight_tying:
            return
        for fit in [fit for fit in self._fits.values() if fit.spec.kind is LayerKind.EMBEDDING and not fit.token_ids]:
            for name in tied_heads(fit.spec, self._layers):
                tied = replace(
                    fit, spec=self._layers.specs[name], a=fit.b.T.contiguous(), b=fit.a.T.contiguous(), num_tensors=0
                )
                own = self._fits.setdefault(name, tied)
                if not _same_tensors(own, tied):
                    self._problems.append(f"ensure_weight_tying is set, and {name} differs from {fit.spec.name}")

    def _check_complete(self, paired: PairedTensors) -> None:
        problems, warnings = missing_modules(paired, self._options, self._layers)
        biased = [name for name, fit in self._fits.items() if fit.rank and f"{name}.bias" in self._layers.parameters]
        problems += missing_tokens(paired, self._options)
        problems += missing_biases(biased, self._with_bias, self._options)
        self._problems += problems
        self._warnings += warnings

    def _check_orientation(self) -> None:
        if self._options.fan_in_fan_out and any(fit.spec.kind is LayerKind.MATMUL for fit in self._fits.values()):
            # PEFT raises as well. For linear layers it ignores the option, and so do we: it is about Conv1D weights.
            self._unsupported.append(Refusal("fan_in_fan_out", "not defined for a bare parameter"))

    def _is_saved(self, module: str) -> bool:
        """Whether `modules_to_save` names the module, or the embedding and the module goes with it."""
        if self._options.ensure_weight_tying and any(
            name.endswith(DEFAULT_EMBEDDING) for name in self._options.modules_to_save
        ):
            return True
        return any(f".{module}".endswith(f".{name}") for name in self._options.modules_to_save)

    def _add_tokens(self, tokens: TrainedTokens) -> None:
        spec = self._spec_of(tokens.module, "trainable_token_indices")
        if spec is None:
            return
        if spec.kind is not LayerKind.EMBEDDING:
            self._refuse_tokens(f"{tokens.module} is not the token embedding")
            return
        by_module = self._options.token_ids
        ids = next((ids for path, ids in by_module.items() if f".{tokens.module}".endswith(f".{path}")), None)
        if ids is None or tuple(tokens.rows.shape) != (len(ids), spec.out_features) or max(ids) >= spec.in_features:
            self._problems.append(
                f"{tokens.name} has shape {tuple(tokens.rows.shape)}; adapter_config.json names "
                f"{0 if ids is None else len(ids)} tokens for it, and the model has {spec.in_features} of width "
                f"{spec.out_features}"
            )
            return
        order = sorted(range(len(ids)), key=ids.__getitem__)
        rows = replace(tokens, rows=tokens.rows[order].contiguous())
        for name in (spec.name, *tied_heads(spec, self._layers)):
            self._add_rows(name, rows, tuple(ids[i] for i in order), num_tensors=1 if name == spec.name else 0)

    def _add_rows(self, name: str, tokens: TrainedTokens, ids: tuple[int, ...], num_tensors: int) -> None:
        """ids: ascending, as the rows of `tokens` are."""
        fit = self._fits.get(name, LayerFit.empty(self._layers.specs[name], tokens.module))
        if fit.rank or fit.values:
            self._refuse_tokens(f"{name} has trained tokens beside other changes")
        else:
            self._fits[name] = replace(fit, token_ids=ids, token_rows=tokens.rows, num_tensors=num_tensors)

    def _refuse_tokens(self, reason: str) -> None:
        self._unsupported.append(Refusal("trainable_token_indices", reason))


def _same_tensors(one: LayerFit, other: LayerFit) -> bool:
    ours, theirs = one.tensors(), other.tensors()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[role], theirs[role]) for role in ours)


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
