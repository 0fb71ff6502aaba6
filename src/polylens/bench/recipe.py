"""The benchmark's model and adapters: random weights of a stated shape, made by a script, kept on disk.

Everything follows from a `Recipe`, so the folder is named by a hash of it: another shape is another folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import (
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from polylens.adapters.pairs import PEFT_PREFIX
from polylens.adapters.read import CONFIG_FILE, SAFETENSORS_FILE
from polylens.core import Component, LayerKind
from polylens.disk_cache import default_cache_dir
from polylens.models.loading import quiet
from polylens.models.outline import outline_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from polylens.core import LayerSpec

RECIPE_VERSION = 1
"""Raise when the same recipe gives other files."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = """\
{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>\
{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"""
"""Nothing but the parts themselves, so that a prompt's length is known: a picture's tokens and two, and its text."""

MAX_POSITIONS = 32768

Targets = Literal["all", "layers", "language"]
"""Every linear layer, or all but the head (vLLM takes no adapters on it), or those of the language model."""


@dataclass(frozen=True)
class Recipe:
    """Shape of a Qwen2-VL model in float32, weights from `seed`. Untied head."""

    hidden: int = 896
    layers: int = 8
    intermediate: int = 4864
    heads: int = 14
    kv_heads: int = 2
    vocabulary: int = 512
    tower_width: int = 640
    tower_layers: int = 8
    tower_heads: int = 10
    tower_mlp_ratio: int = 4
    patch: int = 14
    merge: int = 2
    seed: int = 0
    version: int = RECIPE_VERSION

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


TINY = Recipe(
    hidden=64,
    layers=2,
    intermediate=128,
    heads=4,
    tower_width=32,
    tower_layers=2,
    tower_heads=2,
    tower_mlp_ratio=2,
)
"""For tests of the benchmarks' form; its times mean nothing."""


def model_folder(recipe: Recipe, cache: Path | None = None) -> Path:
    """The checkpoint of `recipe`, built the first time. cache: where, instead of the user's cache folder."""
    return _made_once(_home(recipe, cache) / "model", lambda folder: build_model(recipe, folder))


def adapter_folder(
    recipe: Recipe, *, rank: int, seed: int, targets: Targets = "all", cache: Path | None = None
) -> Path:
    """A PEFT LoRA of `rank` on every linear layer of the targets (the head included), built the first time."""
    model = model_folder(recipe, cache)
    name = f"adapter-{targets}-rank{rank}-seed{seed}"
    return _made_once(
        _home(recipe, cache) / name, lambda folder: build_adapter(model, folder, rank=rank, seed=seed, targets=targets)
    )


def _home(recipe: Recipe, cache: Path | None) -> Path:
    return (cache or default_cache_dir()) / "bench" / recipe.key


def _made_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, built whole or not at all."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            made = Path(temporary) / folder.name
            made.mkdir()
            build(made)
            try:
                os.replace(made, folder)
            except OSError:  # another process was faster; what it made is the same
                if not folder.is_dir():
                    raise
    return folder


def build_model(recipe: Recipe, folder: Path) -> None:
    tokenizer = _tokenizer()
    model = Qwen2VLForConditionalGeneration(_config(recipe, tokenizer)).eval()
    _randomise(model, recipe.seed)
    with quiet(True):
        model.save_pretrained(folder)
    _processor(recipe, tokenizer).save_pretrained(folder)


def _config(recipe: Recipe, tokenizer: Qwen2Tokenizer) -> Qwen2VLConfig:
    half = recipe.hidden // recipe.heads // 2
    section = [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8]  # as Qwen2-VL's 16, 24, 24
    text: dict[str, Any] = {
        "hidden_size": recipe.hidden,
        "num_hidden_layers": recipe.layers,
        "intermediate_size": recipe.intermediate,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "vocab_size": recipe.vocabulary,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": section},
    }
    text |= {f"{kind}_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>") for kind in ("bos", "eos")}
    vision = {
        "depth": recipe.tower_layers,
        "embed_dim": recipe.tower_width,
        "hidden_size": recipe.hidden,
        "num_heads": recipe.tower_heads,
        "mlp_ratio": recipe.tower_mlp_ratio,
        "patch_size": recipe.patch,
        "spatial_merge_size": recipe.merge,
        "temporal_patch_size": 2,
    }
    ids: dict[str, Any] = {
        f"{kind}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for kind, token in (
            ("image", "image_pad"),
            ("video", "video_pad"),
            ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
            ("eos", "im_end"),
            ("pad", "endoftext"),
        )
    }
    return Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, dtype="float32", **ids)


def _tokenizer() -> Qwen2Tokenizer:
    """Bytes and nothing else: as many tokens as (ASCII) characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return Qwen2Tokenizer(
        vocab={byte: index for index, byte in enumerate(alphabet)},
        merges=[],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_TOKENS),
        model_max_length=MAX_POSITIONS,
    )


def _processor(recipe: Recipe, tokenizer: Qwen2Tokenizer) -> Qwen2VLProcessor:
    cell = (recipe.patch * recipe.merge) ** 2
    shape: dict[str, Any] = {
        "patch_size": recipe.patch,
        "merge_size": recipe.merge,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": cell, "longest_edge": 16384 * cell},
    }
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**shape),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**shape),
        chat_template=TEMPLATE,
    )


def _randomise(model: Qwen2VLForConditionalGeneration, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() >= 2:
                parameter.normal_(0, 1 / math.sqrt(parameter[0].numel()), generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1, generator=generator)


def build_adapter(model: Path, folder: Path, *, rank: int, seed: int, targets: Targets) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for spec in _targeted(model, targets):
        a = torch.randn(rank, spec.in_features, generator=generator) / math.sqrt(spec.in_features)
        b = torch.randn(spec.out_features, rank, generator=generator) * (0.1 / math.sqrt(rank))
        tensors[f"{PEFT_PREFIX}{spec.name}.lora_A.weight"] = a
        tensors[f"{PEFT_PREFIX}{spec.name}.lora_B.weight"] = b
    save_file(tensors, folder / SAFETENSORS_FILE)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(spec.name for spec in _targeted(model, targets)),
        "base_model_name_or_path": model.name,
        "bias": "none",
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1), encoding="utf-8")


def _targeted(model: Path, targets: Targets) -> list[LayerSpec]:
    specs = outline_model(model).specs.values()
    return [spec for spec in specs if spec.kind is LayerKind.LINEAR and _is_target(spec, targets)]


def _is_target(spec: LayerSpec, targets: Targets) -> bool:
    if targets == "layers":
        return spec.name != "lm_head"
    return targets == "all" or spec.component is Component.LANGUAGE_MODEL
