"""Tiny checkpoints of many families with random weights, written as real local folders.

Each folder holds what a published checkpoint holds (config, safetensors, tokenizer, chat template, processor
files) and loads through transformers' Auto classes without a network. Sizes are the smallest that keep each
family's peculiarities: windows and a full-attention block (Qwen2.5-VL), deepstack (Qwen3-VL), sliding and full
layers with bidirectional image spans (Gemma 3), a tower whose last layer is not used (LLaVA 1.5).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from tests.families.host import HOSTED
from tests.families.newer import NEWER
from tests.families.packed import PACKED
from tests.families.padded import PADDED
from tests.families.recent import RECENT
from tests.families.recipes import Family
from tests.families.squares import SQUARES
from tests.families.tiled import TILED
from tests.families.without_template import WITHOUT_TEMPLATE

ALL_FAMILIES: Mapping[str, Family] = {
    **PACKED,
    **TILED,
    **SQUARES,
    **PADDED,
    **NEWER,
    **RECENT,
    **WITHOUT_TEMPLATE,
    **HOSTED,
}

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "llava")
"""The families the whole parity matrix runs on; the others get the short one of `tests/parity/test_families.py`."""
VIDEO_FAMILIES = tuple(name for name in FAMILIES if ALL_FAMILIES[name].takes_videos)
"""Those of them whose processor takes videos; the others get sampled frames as pictures."""


def build_checkpoint(family: str, folder: str | Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a checkpoint of `family` into `folder` (created) and return it. The same seed, the same bytes."""
    parts = ALL_FAMILIES[family]
    tokenizer = parts.make_tokenizer()
    model = parts.make_model(tokenizer).eval()
    randomise(model, seed + parts.seed)
    _silence(model, tokenizer.convert_tokens_to_ids(list(parts.silent_tokens)))
    model.generation_config = generation_config(tokenizer, parts.stop_tokens)
    folder = Path(folder)
    model.to(dtype).save_pretrained(folder)
    parts.make_processor(tokenizer).save_pretrained(folder)
    return folder


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Random in every parameter, sized so that pictures matter and greedy answers vary.

    transformers' own initialisation (0.02, zero biases, unit norms) makes tiny models nearly constant functions,
    which would hide a wrong row or a missing term.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(_embedding(model).weight)}
    head = _head(model)
    norms_twice = (
        model.config.model_type.startswith(("gemma", "t5gemma"))
        or model.config.get_text_config().model_type == "gemma2"
    )
    strong_norms = _GEMMA_STRONG_NORMS if norms_twice else ()
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in embeddings:
                parameter.copy_(noise * (1.0 if head.weight is not parameter else 0.25))
            elif parameter.dim() >= 2:
                parameter.copy_(noise * _gain(name) / _fan_in(name, parameter) ** 0.5)
            elif name.endswith("bias"):
                parameter.copy_(noise * 0.1)
            elif name.endswith(strong_norms):  # without it the tied head only repeats one token
                parameter.copy_(3.0 + noise * 0.3)
            elif name.endswith("A_log"):  # slow decay: a state is felt long, and sums of decays stay small
                parameter.copy_(noise * 0.5 - 2)
            elif not name.endswith("weight"):  # CLIP's class embedding
                parameter.copy_(noise)
            else:  # scales of norms: around what they were made with (ones, or zeros for Gemma's 1 + w)
                parameter.add_(noise * 0.1)


_GEMMA_STRONG_NORMS = (
    "post_attention_layernorm.weight",
    "post_self_attn_layernorm.weight",
    "post_feedforward_layernorm.weight",
)
"""Gemma norms a layer's output before adding it; other families use the first name for another norm."""


@torch.no_grad()
def _silence(model: PreTrainedModel, token_ids: list[int]) -> None:
    """Logits of zero, far below the best."""
    if token_ids:
        _head(model).weight[token_ids] = 0.0


def _head(model: PreTrainedModel) -> Any:
    return model.get_output_embeddings() or model.get_decoder().get_output_embeddings()


def _embedding(model: PreTrainedModel) -> Any:
    formulanet = model.config.model_type == "pp_formulanet"
    return model.model.decoder.embed_tokens if formulanet else model.get_input_embeddings()


def _gain(name: str) -> float:
    return 2.0 if "lm_head" in name else 1.2


def _fan_in(name: str, parameter: torch.Tensor) -> int:
    if name.endswith("mm_input_projection_weight"):  # (in, out), used as x @ w
        return parameter.shape[0]
    if ".experts." in name:  # (experts, out, in)
        return parameter.shape[-1]
    return max(1, parameter[0].numel())


def generation_config(tokenizer: PreTrainedTokenizerBase, stop_tokens: tuple[str, ...]) -> GenerationConfig:
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.convert_tokens_to_ids(token) for token in stop_tokens],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
