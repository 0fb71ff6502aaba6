"""Does an adapter fit a model? The file's tensors to layers, every tensor accounted for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from polylens.adapters.completeness import missing_biases, missing_modules, missing_tokens
from polylens.adapters.experts import fit_experts, join_experts
from polylens.adapters.fused import join_parts, split_whole
from polylens.adapters.layer_fit import LayerFit
from polylens.adapters.names import Found, LayerNames
from polylens.adapters.options import DEFAULT_EMBEDDING, Refusal
from polylens.adapters.pairs import pair_tensors
from polylens.adapters.patterns import ALL_LINEAR, is_targeted, pattern_fault
from polylens.core import BARE_KINDS, EXPERT_KINDS, FACTOR_KINDS, LayerKind
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
        if self._options.fan_in_fan_out and any(fit.spec.kind is LayerKind.MATMUL for fit in self._fits.values()):
            # PEFT raises as well. For linear layers it ignores the option, and so do we: it is about Conv1D weights.
            self._unsupported.append(Refusal("fan_in_fan_out", "not defined for a bare parameter"))
        ordered = tuple(self._fits[name] for name in self._layers.specs if name in self._fits)
        warnings = (*self._warnings, *_warnings(ordered, self._options, self._layers))
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
            named = [spec for spec in found.parameters if spec.name.endswith(f".{parameter}")]
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
        if refusal := _pair_refusal(pair, spec):
            self._unsupported.append(refusal)
            return
        self._add_fit(pair, spec, len(pair.names) or 2)

    def _add_fit(self, pair: FactorPair, spec: LayerSpec, num_tensors: int) -> None:
        self._keep(pair, *_fit_layer(pair, spec, self._options), num_tensors)

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
            return
        spec = self._spec_of(part.module, "modules_to_save", part.parameter)
        if spec is None:
            return
        role = "weight" if spec.kind in BARE_KINDS else part.parameter
        expected = expected_shape(spec, role, self._layers)
        wrong = None
        if spec.kind in BARE_KINDS and part.parameter != spec.name.rpartition(".")[2]:
            wrong = f"{part.name}: {part.module} has no such parameter that polylens can replace"
        elif expected is None:
            wrong = f"{part.name}: the model's layer {spec.name} has no {part.parameter}"
        elif tuple(part.value.shape) != expected and not self._has_more_tokens(spec, role, part.value, expected):
            wrong = f"{part.name} has shape {tuple(part.value.shape)}, the model's layer {expected}"
            if _is_of_tokens(spec):
                wrong += f": the adapter is for {part.value.shape[0]} tokens, the model has {expected[0]}"
        if wrong is not None:
            self._problems.append(wrong)
            return
        if role == "bias":
            self._with_bias.add(spec.name)
        fit = self._fits.get(spec.name, LayerFit.empty(spec, part.module))
        if role in fit.values:
            self._problems.append(f"{part.name}: the {role} of {spec.name} is in the file under another name as well")
            return
        if is_copy(part.value, self._layers.parameters.get(parameter_name(spec, role))):
            # PEFT saves the head's and the embeddings' own weights beside their factors, and with bias="all" the
            # biases of layers that were not trained.
            self._num_copies += 1
            return
        may_be_copy = tuple(part.value.shape) == expected
        tied = role == "weight" and spec.name in tied_layers(self._layers)
        if tied and may_be_copy and not self._is_saved(part.module):
            own = self._layers.parameters[parameter_name(spec, role)]
            if is_copy(own.to(part.value.dtype).cpu(), part.value):
                self._num_copies += 1  # the model's own, rounded when it was saved
            else:
                self._problems.append(
                    f"{part.name} is not the model's own and not in modules_to_save; as head and embedding are tied, "
                    "which of them it is for cannot be told"
                )
            return
        values = {**fit.values, role: part.value}
        self._fits[spec.name] = replace(fit, values=values, num_tensors=fit.num_tensors + 1)

    def _has_more_tokens(self, spec: LayerSpec, role: str, value: torch.Tensor, expected: tuple[int, ...]) -> bool:
        """Whether it is an embedding or a head of the model's tokens and of further ones, and those can be served."""
        taller = value.dim() == 2 and value.shape[0] > expected[0] and value.shape[1] == expected[-1]
        return self._layers.more_tokens and _is_of_tokens(spec) and role == "weight" and taller

    def _check_vocabulary(self) -> None:
        """Where the adapter brings tokens, embedding and head must both have them, and factors on neither."""
        own = {spec.name: _num_tokens(spec) for spec in self._layers.specs.values() if _is_of_tokens(spec)}
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
            for name in _tied_heads(fit.spec, self._layers):
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
            reason = f"{tokens.module} is not the token embedding"
            self._unsupported.append(Refusal("trainable_token_indices", reason))
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
        rows = tokens.rows[order].contiguous()
        for name in (spec.name, *_tied_heads(spec, self._layers)):
            target = self._layers.specs[name]
            fit = self._fits.get(name, LayerFit.empty(target, tokens.module))
            if fit.rank or fit.values:
                reason = f"{name} has trained tokens beside other changes"
                self._unsupported.append(Refusal("trainable_token_indices", reason))
                continue
            num = 1 if name == spec.name else 0
            ordered_ids = tuple(ids[i] for i in order)
            self._fits[name] = replace(fit, token_ids=ordered_ids, token_rows=rows, num_tensors=num)


def _is_of_tokens(spec: LayerSpec) -> bool:
    """Whether it is the token embedding or the head: one row of weights a token."""
    return spec.kind is LayerKind.EMBEDDING or (spec.kind is LayerKind.LINEAR and spec.name.endswith("lm_head"))


def _num_tokens(spec: LayerSpec) -> int:
    return spec.in_features if spec.kind is LayerKind.EMBEDDING else spec.out_features


def _same_tensors(one: LayerFit, other: LayerFit) -> bool:
    ours, theirs = one.tensors(), other.tensors()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[role], theirs[role]) for role in ours)


def parameter_name(spec: LayerSpec, role: str) -> str:
    """The name of a layer's weight or bias in the model's state."""
    return spec.name if spec.kind in BARE_KINDS else f"{spec.name}.{role}"


def expected_shape(spec: LayerSpec, role: str, layers: ModelLayers) -> tuple[int, ...] | None:
    """The shape of the base layer's own parameter; None if it has none."""
    own = layers.parameters.get(parameter_name(spec, role))
    return None if own is None else tuple(own.shape)


def is_own_parameter(part: WholeTensor, names: LayerNames, layers: ModelLayers) -> bool:
    """Whether the tensor is of a module that takes no delta, and the model's own."""
    if isinstance(names.find(part.module), Found):
        return False
    paths = {part.module, layers.rename(part.module)}
    owned = (layers.parameters.get(f"{path}.{part.parameter}") for path in paths)
    return any(value is not None and value.shape == part.value.shape and is_copy(part.value, value) for value in owned)


def is_copy(value: torch.Tensor, base: torch.Tensor | None) -> bool:
    """Whether a saved parameter is the base model's own (to the dtype the model runs in)."""
    if base is None or base.is_meta:
        return False
    return bool(torch.equal(value.to(base.dtype), base.cpu()))


def tied_layers(layers: ModelLayers) -> set[str]:
    """The token embedding and the heads that share its weight; empty where none does."""
    embeddings = [spec for spec in layers.specs.values() if spec.kind is LayerKind.EMBEDDING]
    return {name for spec in embeddings for head in _tied_heads(spec, layers) for name in (spec.name, head)}


def _tied_heads(spec: LayerSpec, layers: ModelLayers) -> tuple[str, ...]:
    """Linear layers whose weight is the embedding's own: PEFT trains their rows together."""
    # Parameters that are read from files when they are looked up have an outline, whose objects tell them apart.
    parameters = getattr(layers.parameters, "outline", layers.parameters)
    weight = parameters.get(parameter_name(spec, "weight"))
    return tuple(
        name
        for name, other in layers.specs.items()
        if weight is not None
        and other.kind is LayerKind.LINEAR
        and parameters.get(parameter_name(other, "weight")) is weight
    )


def _pair_refusal(pair: FactorPair, spec: LayerSpec) -> Refusal | None:
    """Factors of a kind that the layer's kind does not take."""
    if spec.kind not in FACTOR_KINDS:
        what = "a parameter of the whole tower" if spec.kind is LayerKind.SHARED else "a norm"
        return Refusal("target_modules", f"{pair.module} is {what}, which takes no factors")
    if pair.magnitude is not None and spec.kind is LayerKind.MATMUL:
        return Refusal("use_dora", f"{pair.module}: DoRA is not defined for a bare parameter")
    if pair.bias is not None and spec.kind in (LayerKind.MATMUL, LayerKind.EMBEDDING):
        return Refusal("lora_bias", f"{pair.module} has no bias")
    return None


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
    if spec.kind is LayerKind.CONV and a.dim() > 2:
        if b[0, 0].numel() != 1:
            return None, f"{pair.module}: lora_B {tuple(b.shape)} is no 1 x 1 convolution"
        a, b = a.flatten(1), b.flatten(1)
    if a.dim() != 2:
        return None, f"{pair.module} has factors of a convolution, the model's layer {spec.name} is none"
    if pair.embedding != (spec.kind is LayerKind.EMBEDDING):
        return None, f"{pair.module}: factors of {'an' if pair.embedding else 'no'} embedding, on a {spec.kind} layer"
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
    if spec.kind is LayerKind.ROUTER and is_targeted(options.target_parameters, f"{trained_name}.weight"):
        trained_name = f"{trained_name}.weight"
    rank = options.rank_of(trained_name)
    overlap = len(options.ranks.matching(trained_name))
    if overlap > 1 and pair.method != "LORA" and pair.given_rank is None:
        return None, f"{pair.module}: {overlap} entries of rank_pattern match it, and its tensors do not show the rank"
    if not pair.has_rank(rank):
        why = f" ({overlap} entries of rank_pattern match it)" if overlap > 1 else ""
        return None, f"{pair.module}: rank {pair.told_rank} in the file, {rank} in adapter_config.json{why}"
    if wrong := _extras_problem(pair, spec, options):
        return None, wrong
    magnitude = None if pair.magnitude is None else pair.magnitude.flatten()
    scaling = options.scaling_of(trained_name)
    return LayerFit(spec, trained_name, a, b, scaling, magnitude, pair.bias), ""


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


def _warnings(fits: tuple[LayerFit, ...], options: LoraOptions, layers: ModelLayers) -> tuple[str, ...]:
    """Things that are odd but change nothing of what is applied."""
    found = []
    if layers.source and options.base_model and _last_part(options.base_model) != _last_part(layers.source):
        found.append(
            f"its config says it was trained on {options.base_model}; everything fits this model, {layers.source}"
        )
    factored = [fit for fit in fits if fit.rank]
    names = {fit.spec.name: fit.trained_name for fit in factored}
    for option, value_of in (("rank_pattern", options.rank_of), ("alpha_pattern", options.alpha_of)):
        if differing := [name for name, trained in names.items() if value_of(name) != value_of(trained)]:
            found.append(
                f"{option} gives {differing[0]} another value than {names[differing[0]]}, its name in the file; "
                "the name in the file counts"
            )
    for name in names.values():
        if len(set(values := options.alphas.matching(name))) > 1:
            # PEFT sorts patterns when it saves, so which one came first in training is lost.
            found.append(f"{len(values)} entries of alpha_pattern match {name}; the first in the file counts")
            break
    target = options.target_modules
    if target and target != ALL_LINEAR and not (isinstance(target, str) and pattern_fault(target)):
        linear = [fit.trained_name for fit in factored if fit.spec.kind is LayerKind.LINEAR]
        if missed := [name for name in linear if not is_targeted(target, name)]:
            found.append(f"target_modules does not name {len(missed)} layers that have tensors, e.g. {missed[0]}")
    silent = [fit.spec.name for fit in factored if _is_zero(fit)]
    if silent:
        found.append(f"{len(silent)} layers have a delta of zero, e.g. {silent[0]}")
    return tuple(found)


def _is_zero(fit: LayerFit) -> bool:
    if fit.magnitude is not None or fit.lora_bias is not None or fit.values:
        return False
    return not bool(fit.b.any()) or not bool(fit.a.any()) or fit.scaling == 0


def _last_part(path: str) -> str:
    """A model's name without where it lies: folders and organisations differ between trainers and servers."""
    return path.rstrip("/").rpartition("/")[2].lower()
