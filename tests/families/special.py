"""Random PEFT adapters that train more than plain factors, saved by PEFT itself with its default options."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

from tests.families.adapters import CONNECTOR_MARKS, target_names


def _linear(model: PreTrainedModel, *, biased: bool = False) -> list[str]:
    """Every second linear layer of the encoder and of the text model; only those with a bias if `biased`."""
    names, _ = target_names(model, "all")
    modules = dict(model.named_modules())
    names = [name for name in names if name != "lm_head"]
    if biased:
        return [name for name in names if modules[name].bias is not None]
    return names[::2]


def _modules(model: PreTrainedModel, kind: type[nn.Module] | str) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if (type(module).__name__.endswith(kind) if isinstance(kind, str) else isinstance(module, kind))
    ]


def _connector(model: PreTrainedModel) -> list[str]:
    """The connector's modules with weights; PEFT cannot load one saved module inside another."""
    names = [name for name, module in model.named_modules() if any(mark in name for mark in CONNECTOR_MARKS)]
    modules = dict(model.named_modules())
    weighted = [name for name in names if next(modules[name].parameters(recurse=False), None) is not None]
    return [name for name in weighted if not any(name.startswith(f"{other}.") for other in weighted)]


def tower_of(model: PreTrainedModel) -> str:
    tower = model.get_encoder(modality="image")
    return next(name for name, module in model.named_modules() if module is tower)


def _plain_norms(model: PreTrainedModel) -> list[str]:
    """Norms of the tower and of the text model that do not sit inside attention."""
    return [name for name in _modules(model, "Norm") if not name.endswith(("q_norm", "k_norm"))]


SPECIAL: dict[str, Callable[[PreTrainedModel], dict[str, Any] | PeftConfig]] = {
    "dora": lambda model: {"target_modules": _linear(model), "use_dora": True, "use_rslora": True},
    "dora with biases": lambda model: {
        "target_modules": _linear(model, biased=True)[::2],
        "use_dora": True,
        "bias": "all",
    },
    "lora_bias": lambda model: {"target_modules": _linear(model, biased=True), "lora_bias": True},
    "bias all": lambda model: {"target_modules": _linear(model), "bias": "all"},
    "bias lora_only": lambda model: {"target_modules": _linear(model, biased=True), "bias": "lora_only"},
    "connector": lambda model: {"target_modules": ["q_proj"], "modules_to_save": _connector(model)},
    "norms": lambda model: {"target_modules": ["k_proj"], "modules_to_save": _plain_norms(model)},
    "tower saved": lambda model: {
        "target_modules": r".*(language_model|text_model\.layers|merger|projector).*(q_proj|linear_1|mlp\.0)",
        "modules_to_save": [tower_of(model)],
    },
    "head": lambda model: {"target_modules": ["v_proj", "lm_head"]},
    "head saved": lambda model: {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "embedding": lambda model: {"target_modules": ["v_proj", "embed_tokens"]},
    "embedding dora": lambda model: {"target_modules": ["v_proj", "embed_tokens"], "use_dora": True},
    "embedding saved": lambda model: {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]},
    "embedding tied": lambda model: {"target_modules": ["v_proj", "embed_tokens"], "ensure_weight_tying": True},
    "embedding saved and tied": lambda model: {
        "target_modules": ["v_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
    "tokens": lambda model: {"target_modules": ["o_proj"], "trainable_token_indices": [40, 7, 90, 101]},
    "loha": lambda model: LoHaConfig(r=2, alpha=8, target_modules=_linear(model), init_weights=False),
    "lokr": lambda model: LoKrConfig(r=2, alpha=2, target_modules=_linear(model)[1::2], init_weights=False),
    "convolution": lambda model: {
        "target_modules": ["q_proj", *_modules(model, nn.Conv2d), *_modules(model, nn.Conv3d)]
    },
    "convolution dora": lambda model: {
        "target_modules": [*_modules(model, nn.Conv2d), *_modules(model, nn.Conv3d)],
        "use_dora": True,
    },
}
"""Kinds of adapter by name: a model to the options of its `LoraConfig`, or to another method's config."""


def _experts(model: PreTrainedModel) -> list[str]:
    """The modules whose weights are those of all experts."""
    return _modules(model, "Experts")


def _expert_parameters(model: PreTrainedModel) -> list[str]:
    return [f"{name}.{parameter}" for name in _experts(model) for parameter in ("gate_up_proj", "down_proj")]


def _routers(model: PreTrainedModel) -> list[str]:
    return _modules(model, "Router")


INNER_NORMS: dict[str, Callable[[PreTrainedModel], dict[str, Any]]] = {
    "head norms": lambda model: {"target_modules": ["k_proj"], "modules_to_save": ["q_norm", "k_norm"]},
}
"""Of families that norm queries and keys."""

MIXTURES: dict[str, Callable[[PreTrainedModel], dict[str, Any]]] = {
    "experts": lambda model: {"target_modules": ["o_proj"], "target_parameters": _expert_parameters(model)},
    "experts and router": lambda model: {
        "target_modules": [],
        "target_parameters": [*_expert_parameters(model), *(f"{name}.weight" for name in _routers(model))],
        "rank_pattern": {"gate_up_proj": 5},
        "use_rslora": True,
    },
    "experts saved": lambda model: {
        "target_modules": ["o_proj"],
        "modules_to_save": [*_experts(model), *_routers(model)],
    },
}
"""Of families with experts."""

MIXTURE_FAMILIES = ("qwen3_vl_moe", "ernie4_5_vl_moe", "llama4", "aria")
"""Experts with outputs first; two sets of them, for tokens of one kind each; with inputs first, where every token goes
to all, and where each goes to its own."""

ROUTER_ALONE: dict[str, Callable[[PreTrainedModel], dict[str, Any]]] = {
    "router": lambda model: {
        "target_modules": ["o_proj"],
        "target_parameters": [f"{name}.weight" for name in _routers(model)],
    },
}
"""What hosts can apply that cannot change experts."""

_ALL_KINDS = {**SPECIAL, **INNER_NORMS, **MIXTURES, **ROUTER_ALONE}


def kinds_of(family: str) -> tuple[str, ...]:
    """The kinds that a family has layers for."""
    inner = INNER_NORMS if family in ("qwen3_vl", "qwen3_vl_moe", "gemma3") else {}
    return (*SPECIAL, *inner, *(MIXTURES if family in MIXTURE_FAMILIES else {}))


def make_special(checkpoint: str | Path, folder: str | Path, kind: str, *, rank: int = 3, seed: int = 0) -> Path:
    """Write an adapter of the kind with random values for all that it trains; return its folder."""
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    options = _ALL_KINDS[kind](model)
    config = options if isinstance(options, PeftConfig) else LoraConfig(r=rank, lora_alpha=2 * rank, **options)
    adapted = get_peft_model(model, config)
    randomise_special(adapted, seed)
    adapted.save_pretrained(str(folder))
    return Path(folder)


@torch.no_grad()
def randomise_special(adapted: PeftModel, seed: int) -> None:
    """Values near enough to the base model's that answers stay varied, far enough that they change."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(adapted.named_parameters()):
        if not parameter.requires_grad or name.endswith("e_score_correction_bias"):  # no gradient reaches that
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if ".lora_A." in name:
            parameter.copy_(noise / math.sqrt(parameter[0].numel()))
        elif ".lora_embedding_A." in name:
            parameter.copy_(noise)
        elif ".lora_B." in name or ".lora_embedding_B." in name:
            parameter.copy_(0.15 * noise)
        elif parameter.dim() == 1 and ".bias" in name:
            parameter.add_(0.2 * noise)
        else:
            parameter.mul_(1 + 0.3 * noise)
