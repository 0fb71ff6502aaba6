"""The options of `adapter_config.json`: those polylens applies, and a refusal of every other one that matters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from polylens.adapters.lycoris import LYCORIS_TYPES
from polylens.adapters.patterns import Patterns, pattern_fault
from polylens.errors import AdapterFormatError, AdapterUnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_EMBEDDING = "embed_tokens"
"""The module that a bare list of `trainable_token_indices` is for; PEFT asks the model for its input embedding."""

MAX_RANK = 1 << 16
"""Largest rank taken from a config: above any layer's width, so that a typing error is told as one."""

# Options that say how the adapter was trained, or which layers got tensors. The tensors themselves decide here.
_INFORMATIONAL = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
        # ms-swift: dtype while training, and LoRA+ learning rates
        "lora_dtype",
        "lorap_emb_lr",
        "lorap_lr_ratio",
    }
)

_APPLIED = frozenset(
    {
        "alpha_pattern",
        "bias",
        "ensure_weight_tying",
        "fan_in_fan_out",
        "init_lora_weights",
        "lora_alpha",
        "lora_bias",
        "modules_to_save",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "trainable_token_indices",
        "use_dora",
        "use_rslora",
    }
)

# Of LoHa and LoKr: applied (alpha), about training, or told by the tensors' shapes.
_LYCORIS = frozenset(
    {
        "alpha",
        "decompose_both",
        "decompose_factor",
        "init_weights",
        "module_dropout",
        "rank_dropout",
        "rank_dropout_scale",
        "use_effective_conv2d",
    }
)

# Initialisations that leave the base weights as they are.
_PLAIN_INITS = frozenset({"gaussian", "eva", "mica", "orthogonal", "true", "false"})

_BIASES = ("none", "all", "lora_only")
"""Which biases were trained; the file holds them as they are after training."""

_CONVERT = (
    "save it once more as a plain LoRA with PEFT's save_pretrained(folder, "
    "path_initial_model_for_weight_conversion=<the adapter as it was before training>)"
)
_CONVERSIONS = {
    "pissa": _CONVERT,
    "olora": _CONVERT,
    "corda": _CONVERT,
    "lora": _CONVERT,
    "loftq": "serve it over the base model that LoftQ saved, with init_lora_weights set to true in its config",
}
"""Initialisations that change the base weights, so that the plain base model and the factors would be another model."""

_REASONS = {
    "alora_invocation_tokens": "the adapter starts in the middle of the prompt (aLoRA)",
    "arrow_config": "experts are routed per token (Arrow)",
    "kasa_config": "the base weights are truncated (KaSA)",
    "layer_replication": "layers of the base model are replicated",
    "megatron_config": "the layers are Megatron's",
    "monteclora_config": "weights are sampled (MonteCLoRA)",
    "use_bdlora": "the factors are block-diagonal (BD-LoRA)",
    "use_qalora": "inputs are pooled in groups (QA-LoRA)",
    "velora_config": "tensors of VeLoRA are in the file",
}


@dataclass(frozen=True)
class Refusal:
    """One option polylens does not apply, and why its value would change the result."""

    option: str
    reason: str


@dataclass(frozen=True)
class LoraOptions:
    """What `adapter_config.json` says about applying the tensors; validated.

    rank and alpha: the default of every layer, unless a pattern gives another for it. target_modules is
    kept for reports only: which layers change is read from the tensors.
    """

    rank: int
    alpha: float
    peft_type: str = "LORA"
    """Or LOHA, LOKR, which have no options but these, targets and `modules_to_save`."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    target_modules: tuple[str, ...] | str | None = None
    target_parameters: tuple[str, ...] = ()
    use_dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    modules_to_save: tuple[str, ...] = ()
    ensure_weight_tying: bool = False
    token_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """`trainable_token_indices`: end of an embedding's path -> the tokens whose rows were trained."""
    base_model: str | None = None
    peft_version: str | None = None

    @cached_property
    def ranks(self) -> Patterns:
        """`rank_pattern`, ready for matching."""
        return Patterns(self.rank_pattern)

    @cached_property
    def alphas(self) -> Patterns:
        """`alpha_pattern`, ready for matching."""
        return Patterns(self.alpha_pattern)

    def rank_of(self, name: str) -> int:
        """The rank of the layer `name`, as the layer was called when the adapter was trained."""
        return int(self.ranks.first(name, self.rank))

    def alpha_of(self, name: str) -> float:
        """The alpha of the layer `name`, as the layer was called when the adapter was trained."""
        return self.alphas.first(name, self.alpha)

    def scaling_of(self, name: str) -> float:
        """The factor of B·A: alpha / r, or alpha / √r with rank-stabilised LoRA (arXiv 2312.03732)."""
        rank = self.rank_of(name)
        return self.alpha_of(name) / (math.sqrt(rank) if self.use_rslora else rank)


def parse_options(config: Mapping[str, Any]) -> LoraOptions:
    """Validate the values of the options polylens applies.

    Raises AdapterFormatError: a value is of a wrong type or out of range. Whether options that are not
    applied are set is told by `refusals`.
    """
    if "peft_type" not in config:
        raise AdapterFormatError("adapter_config.json has no peft_type: not a PEFT adapter")
    peft_type = _peft_type(config)
    alpha = "alpha" if peft_type in LYCORIS_TYPES else "lora_alpha"
    return LoraOptions(
        rank=_rank(config.get("r"), "r"),
        alpha=_alpha(config.get(alpha), alpha),
        peft_type=peft_type,
        rank_pattern={key: _rank(value, f"rank_pattern[{key!r}]") for key, value in _pattern(config, "rank_pattern")},
        alpha_pattern={
            key: _alpha(value, f"alpha_pattern[{key!r}]") for key, value in _pattern(config, "alpha_pattern")
        },
        use_rslora=_bool(config, "use_rslora"),
        fan_in_fan_out=_bool(config, "fan_in_fan_out"),
        target_modules=_target_modules(config.get("target_modules")),
        target_parameters=_strings(config.get("target_parameters") or [], "target_parameters"),
        use_dora=_bool(config, "use_dora"),
        lora_bias=_bool(config, "lora_bias"),
        bias=_optional_string(config, "bias") or "none",
        modules_to_save=_strings(config.get("modules_to_save") or [], "modules_to_save"),
        ensure_weight_tying=_bool(config, "ensure_weight_tying"),
        token_ids=_token_ids(config.get("trainable_token_indices") or {}),
        base_model=_optional_string(config, "base_model_name_or_path"),
        peft_version=_optional_string(config, "peft_version"),
    )


def refusals(config: Mapping[str, Any]) -> tuple[Refusal, ...]:
    """Every option in `config` that would change the result and is not applied."""
    found = []
    peft_type = _peft_type(config)
    if peft_type not in ("LORA", *LYCORIS_TYPES):
        found.append(Refusal("peft_type", f"{_shown(config['peft_type'])} is not LORA, LOHA or LOKR"))
    own = _LYCORIS if peft_type in LYCORIS_TYPES else frozenset()
    if not _is_neutral(config.get("bias")) and config["bias"] not in _BIASES:
        found.append(Refusal("bias", f"{_shown(config['bias'])} is none of {', '.join(_BIASES)}"))
    init = config.get("init_lora_weights")
    if init is not None and str(init).lower() not in _PLAIN_INITS:
        found.append(Refusal("init_lora_weights", _init_reason(init)))
    for option, value in config.items():
        if option in _APPLIED or option in _INFORMATIONAL or option in own or _is_neutral(value):
            continue
        reason = _REASONS.get(option, "unknown to polylens, and it may change the result")
        found.append(Refusal(option, f"{reason} (value {_shown(value)})"))
    return tuple(found)


def _peft_type(config: Mapping[str, Any]) -> str:
    return str(config.get("peft_type", "LORA")).upper()


def check_refusals(config: Mapping[str, Any]) -> None:
    """Raise AdapterUnsupportedError naming the first option that is not applied, and mentioning the others."""
    found = refusals(config)
    if found:
        listed = "; ".join(f"{refusal.option}: {refusal.reason}" for refusal in found)
        raise AdapterUnsupportedError(f"adapter option not supported: {listed}", option=found[0].option)


def _init_reason(init: Any) -> str:
    family = str(init).lower().partition("_")[0]  # `pissa_niter_16` is PiSSA, `lora_ga` LoRA-GA
    conversion = _CONVERSIONS.get(family)
    if conversion is None:
        return f"{_shown(init)} is unknown to polylens, and it may change the base weights"
    return f"{_shown(init)} changes the base weights; {conversion}"


def _is_neutral(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _rank(value: Any, option: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANK:
        raise AdapterFormatError(f"{option} must be a whole number from 1 to {MAX_RANK}, not {_shown(value)}")
    return value


def _alpha(value: Any, option: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise AdapterFormatError(f"{option} must be a finite number, not {_shown(value)}")
    return number


def _bool(config: Mapping[str, Any], option: str) -> bool:
    value = config.get(option)
    if value is not None and not isinstance(value, bool):
        raise AdapterFormatError(f"{option} must be true or false, not {_shown(value)}")
    return bool(value)


def _optional_string(config: Mapping[str, Any], option: str) -> str | None:
    value = config.get(option)
    if value is not None and not isinstance(value, str):
        raise AdapterFormatError(f"{option} must be a string, not {_shown(value)}")
    return value or None


def _strings(value: Any, option: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise AdapterFormatError(f"{option} must be a list of names, not {_shown(value)}")
    return tuple(value)


def _token_ids(value: Any) -> dict[str, tuple[int, ...]]:
    """By the path of the embedding; a bare list is for the input embedding, as in PEFT."""
    by_module = {DEFAULT_EMBEDDING: value} if isinstance(value, list) else value
    ok = isinstance(by_module, dict) and all(
        isinstance(ids, list) and all(type(one) is int and one >= 0 for one in ids) and len(set(ids)) == len(ids)
        for ids in by_module.values()
    )
    if not ok:
        raise AdapterFormatError(
            f"trainable_token_indices must be a list of different token ids, or lists by module, not {_shown(value)}"
        )
    return {str(module): tuple(ids) for module, ids in by_module.items()}


def _target_modules(value: Any) -> tuple[str, ...] | str | None:
    if value is None:
        return None
    if isinstance(value, str):
        return value
    return _strings(value, "target_modules")


def _pattern(config: Mapping[str, Any], option: str) -> list[tuple[str, Any]]:
    value = config.get(option) or {}
    if not isinstance(value, dict):
        raise AdapterFormatError(f"{option} must be an object of patterns, not {_shown(value)}")
    for key in value:
        if fault := pattern_fault(key):
            raise AdapterFormatError(f"{option}: {fault}")
    return list(value.items())
