"""Random PEFT adapters over a checkpoint, saved by PEFT itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

Targets = Literal["tower", "connector", "connector+language", "language", "all", "sounds"]
TARGETS: tuple[Targets, ...] = ("tower", "connector", "connector+language", "language", "all")

CONNECTOR_MARKS = (
    "merger",
    "multi_modal_projector",
    "layerwise_projectors",
    "spatial_projectors",
    "vision_projection",
    ".connector.",
    "downsample",
    "mm_projector",
    "model.projector",
    "resampler_model",
    "head_linear",
    "embed_vision",
    ".aligner.",
    "density_router",
    "generation_aligner",
    "generation_head",
    "patch_merger",
    "qformer",
    "language_projection",
    "image_to_text_projection",
    "visual_projection",
    "perceiver_resampler",
    "vision_embed_tokens",
)
"""Parts of a module path that belong to the connector in one of the families."""
SOUND_MARKS = ("audio_tower",)
"""Parts that hear: no adapter of these tests changes them."""
TOWER_MARKS = (
    "visual",
    "vision_tower",
    "image_tower",
    "video_tower",
    "vision_encoder",
    "vision_model",
    "image_encoder",
)
PICTURE_ENCODERS = ("encoder.", "model.encoder.")
"""How names of the tower begin in models that encode nothing but pictures."""
GEMMA_PROJECTOR = "multi_modal_projector.mm_input_projection_weight"
"""Gemma 3's connector: a bare parameter, which PEFT reaches through `target_parameters`."""

STRENGTH = 0.6
"""Size of a delta relative to its weight: large enough to change answers, small enough to leave them varied."""


def make_adapter(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    targets: Targets,
    rank: int = 4,
    rank_pattern: Mapping[str, int] | None = None,
    alpha: float | None = None,
    seed: int,
    use_rslora: bool = False,
) -> Path:
    """Write an adapter with random non-zero A and B for every adaptable layer of `targets`; return its folder.

    rank_pattern: as PEFT's (module name or regex -> rank). alpha: `lora_alpha`, default 2 * rank. The deltas'
    size follows the weights' (`STRENGTH`), whatever rank and alpha are.
    """
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    modules, parameters = target_names(model, targets)
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        rank_pattern=dict(rank_pattern or {}),
        target_modules=modules,
        target_parameters=parameters or None,
        use_rslora=use_rslora,
    )
    adapted = get_peft_model(model, config)
    randomise_lora(adapted, seed)
    # PEFT would add the whole head's weights to the file where lm_head is a target.
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    return Path(folder)


def target_names(model: PreTrainedModel, targets: Targets) -> tuple[list[str], list[str]]:
    """Names of the linear layers, and of the bare parameters, that `targets` stands for.

    "all" takes the head too where it is not tied to the embeddings (tied, a delta would change both).
    """
    wanted = set(targets.split("+")) if targets != "all" else {"tower", "connector", "language"}
    layers = [(name, module) for name, module in model.named_modules() if not _is_in_picture_tokenizer(name)]
    linear = [name for name, module in layers if _is_plain_linear(module)]
    if not any(component_of(name) == "tower" for name in linear):
        linear += [name for name, module in layers if _is_pointwise(module) and component_of(name) == "tower"]
    if not any(component_of(name) == "connector" for name in linear):
        linear += [name for name, module in layers if _is_of_patches(module) and component_of(name) == "connector"]
    modules = [name for name in linear if not _is_head(name) and component_of(name) in wanted]
    has_plain_head = any(
        name.endswith("lm_head") and type(module) is nn.Linear for name, module in model.named_modules()
    )
    if targets == "all" and has_plain_head and not getattr(model.config, "tie_word_embeddings", False):
        modules.append("lm_head")
    parameters = [GEMMA_PROJECTOR] if "connector" in wanted and _has_gemma_projector(model) else []
    return modules, parameters


def _is_in_picture_tokenizer(name: str) -> bool:
    return "vqmodel" in name or "vision_tokenizer" in name


def _is_plain_linear(module: nn.Module) -> bool:
    """Llama 4's router is a linear layer that returns a tuple, and the last of torch's attention (Aria) is never
    called: PEFT cannot adapt them."""
    never_called = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return isinstance(module, nn.Linear) and not never_called and not type(module).__name__.endswith("Router")


def _is_head(name: str) -> bool:
    """GIT's is `output`, which PEFT takes for other modules' too; IDEFICS' has two parts, which polylens refuses;
    T5Gemma 2's is tied to its embedding."""
    return name.endswith("lm_head") or name in ("output", "lm_head.additional_fc", "lm_head.out_proj")


def _is_pointwise(module: nn.Module) -> bool:
    """The linear layers of towers that are convolutions throughout (Gemma 3n)."""
    return isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) and module.groups == 1


def _is_of_patches(module: nn.Module) -> bool:
    """The layers of connectors that are convolutions throughout (HY 4 VL): linear in patches that do not overlap."""
    whole = isinstance(module, nn.Conv2d) and module.kernel_size == module.stride and not any(module.padding)
    return whole and module.groups == 1


def component_of(name: str) -> str:
    if any(mark in name for mark in SOUND_MARKS):
        return "sounds"
    if "patch_dense" in name:  # all that Gemma 4 12B has in place of a tower
        return "tower"
    if any(mark in name for mark in CONNECTOR_MARKS) or name.startswith(
        "model.vision_adapter."
    ):  # Muse; Llama 4's is in its tower
        return "connector"
    encodes_pictures = name.startswith(PICTURE_ENCODERS) and ".text_model." not in name
    in_tower = encodes_pictures or any(mark in name for mark in TOWER_MARKS)
    return "tower" if in_tower else "language"


def _has_gemma_projector(model: PreTrainedModel) -> bool:
    return any(name.endswith(GEMMA_PROJECTOR) for name, _ in model.named_parameters())


def randomise_lora(adapted: PeftModel, seed: int) -> None:
    """Random A; random B scaled so that scaling * |B A| is about STRENGTH * |W|."""
    generator = torch.Generator().manual_seed(seed)
    for _, module in sorted(adapted.named_modules()):
        if not getattr(module, "lora_A", None):
            continue
        a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
        rank, fan_in = len(a), a[0].numel()
        with torch.no_grad():
            a.copy_(torch.randn(a.shape, generator=generator) / math.sqrt(fan_in))
            b.copy_(torch.randn(b.shape, generator=generator) / math.sqrt(rank))
            b.mul_(STRENGTH / module.scaling["default"])
