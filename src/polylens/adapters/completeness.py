"""What an adapter's config says was trained must be in its file: else it is not the adapter that was trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from polylens.adapters.options import LoraOptions
    from polylens.adapters.pairs import PairedTensors
    from polylens.core import ModelLayers


def missing_modules(paired: PairedTensors, options: LoraOptions, layers: ModelLayers) -> tuple[list[str], list[str]]:
    """(problems, warnings) about modules of `modules_to_save` without a tensor in the file.

    PEFT passes over names that no module has; those of the model's own modules it would leave untrained.
    """
    saved = [part.module for part in paired.whole]
    missing = [name for name in options.modules_to_save if not _any_named(name, saved)]
    known = [name for name in missing if _any_named(name, (*layers.specs, *layers.other_modules))]
    problems = [f"modules_to_save names {name}, of which the file has no tensor" for name in known]
    unknown = [name for name in missing if name not in known]
    warnings = [f"modules_to_save names {name}, which neither model nor file have" for name in unknown]
    return problems, warnings


def missing_tokens(paired: PairedTensors, options: LoraOptions) -> list[str]:
    """A problem if `trainable_token_indices` names tokens and the file has rows of none."""
    if any(options.token_ids.values()) and not paired.tokens:
        return ["trainable_token_indices names tokens, and the file has no rows of them"]
    return []


def missing_biases(factored: Iterable[str], with_bias: Collection[str], options: LoraOptions) -> list[str]:
    """A problem if biases were trained, and the file lacks that of a layer with factors.

    factored: layers with factors whose base layer has a bias. with_bias: layers whose bias is in the file.
    """
    missing = [name for name in factored if name not in with_bias] if options.bias != "none" else []
    if not missing:
        return []
    return [f"bias is {options.bias!r} in adapter_config.json, and the file has no bias of {missing[0]}"]


def _any_named(name: str, modules: Iterable[str]) -> bool:
    """Whether one of the paths is a module of that name, or inside of one."""
    return any(f".{name}." in f".{module}." for module in modules)
