"""The options of `adapter_config.json`: those polylens applies, and a refusal of every other one that matters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polylens.adapters.patterns import pattern_fault, pattern_key
from polylens.errors import AdapterFormatError, AdapterUnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        "fan_in_fan_out",
        "init_lora_weights",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "use_rslora",
    }
)

# Initialisations that leave the base weights as they are; others (pissa, olora, corda, loftq, lora_ga, mica …)
# change the base weights or how the tensors are used, so the plain base model plus delta would be another model.
_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "true", "false"})

_REASONS = {
    "alora_invocation_tokens": "the adapter starts in the middle of the prompt (aLoRA)",
    "arrow_config": "experts are routed per token (Arrow)",
    "kasa_config": "the base weights are truncated (KaSA)",
    "layer_replication": "layers of the base model are replicated",
    "lora_bias": "the adapter has biases",
    "megatron_config": "the layers are Megatron's",
    "modules_to_save": "whole modules are replaced",
    "monteclora_config": "weights are sampled (MonteCLoRA)",
    "trainable_token_indices": "embedding rows are replaced",
    "use_bdlora": "the factors are block-diagonal (BD-LoRA)",
    "use_dora": "magnitudes are trained as well (DoRA)",
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
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    target_modules: tuple[str, ...] | str | None = None
    target_parameters: tuple[str, ...] = ()
    base_model: str | None = None
    peft_version: str | None = None

    def rank_of(self, name: str) -> int:
        """The rank of the layer `name`, as the layer was called when the adapter was trained."""
        return self.rank_pattern.get(pattern_key(self.rank_pattern, name), self.rank)

    def alpha_of(self, name: str) -> float:
        """The alpha of the layer `name`, as the layer was called when the adapter was trained."""
        return self.alpha_pattern.get(pattern_key(self.alpha_pattern, name), self.alpha)

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
    return LoraOptions(
        rank=_rank(config.get("r"), "r"),
        alpha=_alpha(config.get("lora_alpha"), "lora_alpha"),
        rank_pattern={key: _rank(value, f"rank_pattern[{key!r}]") for key, value in _pattern(config, "rank_pattern")},
        alpha_pattern={
            key: _alpha(value, f"alpha_pattern[{key!r}]") for key, value in _pattern(config, "alpha_pattern")
        },
        use_rslora=_bool(config, "use_rslora"),
        fan_in_fan_out=_bool(config, "fan_in_fan_out"),
        target_modules=_target_modules(config.get("target_modules")),
        target_parameters=_strings(config.get("target_parameters") or [], "target_parameters"),
        base_model=_optional_string(config, "base_model_name_or_path"),
        peft_version=_optional_string(config, "peft_version"),
    )


def refusals(config: Mapping[str, Any]) -> tuple[Refusal, ...]:
    """Every option in `config` that would change the result and is not applied."""
    found = []
    if str(config.get("peft_type", "LORA")).upper() != "LORA":
        found.append(Refusal("peft_type", f"{_shown(config['peft_type'])} is not LORA"))
    if not _is_neutral(config.get("bias")) and config["bias"] != "none":
        found.append(Refusal("bias", f"{_shown(config['bias'])} changes biases of the base model"))
    init = config.get("init_lora_weights")
    if init is not None and str(init).lower() not in _PLAIN_INITS:
        found.append(
            Refusal("init_lora_weights", f"{_shown(init)} changes the base weights; convert the adapter first")
        )
    for option, value in config.items():
        if option in _APPLIED or option in _INFORMATIONAL or _is_neutral(value):
            continue
        reason = _REASONS.get(option, "unknown to polylens, and it may change the result")
        found.append(Refusal(option, f"{reason} (value {_shown(value)})"))
    return tuple(found)


def check_refusals(config: Mapping[str, Any]) -> None:
    """Raise AdapterUnsupportedError naming the first option that is not applied, and mentioning the others."""
    found = refusals(config)
    if found:
        listed = "; ".join(f"{refusal.option}: {refusal.reason}" for refusal in found)
        raise AdapterUnsupportedError(f"adapter option not supported: {listed}", option=found[0].option)


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
