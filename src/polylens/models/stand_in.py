"""A small float32 model of the same architecture as a big one: for runs that ask how, not what, it computes.

Its text model keeps the first layers, so many that one of every kind is among them, at a fraction of the width; its
tower keeps few blocks (`probe_cut`); windows become so short that a prompt of some dozen tokens goes beyond them. The
weights are random and such that all of them matter.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from polylens.models.probe_copy import MAX_UNCUT_PARAMETERS, random_model
from polylens.models.probe_cut import cut_tower

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MIN_TEXT_LAYERS = 4
"""Layers kept at least: deepstack features go to the first three, and families that take turns do so in fours."""

WINDOW = 32
"""Tokens of sliding windows and chunks, whatever they were: fewer than a prompt has, more than follow its last
picture."""

_WINDOWS = ("sliding_window", "attention_chunk_size")
_SMALL = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 2,
    "topk_group": 1,
}
"""Entries of a text config that cost memory but no kind of computation, and what is left of them."""
_INNER_WIDTH = 64
_VOCABULARY = 64
_OF_SINGLE_TOKENS = ("mlp", "moe")
"""Types of layers through which no token sees another (Nemotron-H): none is the one that shows what others computed."""
_LAYER_NUMBERS = re.compile(r"(?:_layers|_idx|_idxs|_indices|_indexes)$")
_FIRST_LAYERS = ("first_k_dense_replace", "moe_layer_start_index")
"""Entries that say from which layer on another kind comes."""
_TEXT_WIDTH_ELSEWHERE = re.compile(r"out_?hidden|out(?:put)?_dim|proj\w*_dim|projection|text_|llm_|language")


def stand_in(model: PreTrainedModel, *, narrow: bool = True) -> PreTrainedModel:
    """Make the stand-in of `model` from its config, on its device. A model that is small already is only copied.

    narrow: whether the text model's width may be cut too; some configs do not bear it, and then transformers raises
    here or when the stand-in runs.
    """
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    for name in _WINDOWS:
        if getattr(text, name, None):
            setattr(text, name, WINDOW)
    is_big = sum(p.numel() for p in model.parameters()) > MAX_UNCUT_PARAMETERS
    if is_big:
        _cut_text(text)
        _narrow_text(config, text, width=narrow)
        _cut_tower(config, model)
    # None: each part of the model takes its default, which takes float32.
    small, _ = random_model(model, config, attn_implementation=None)
    if is_big:
        _restore_vocabulary(small, _num_embeddings(model))
    return small


def _lower(config: Any, name: str, most: int) -> None:
    value = getattr(config, name, None)
    if isinstance(value, int) and not isinstance(value, bool) and value > most:
        setattr(config, name, most)


def _cut_text(text: PreTrainedConfig) -> None:
    """Keep the first layers, as many as have one of every kind among them, and one that shows what these computed."""
    depth = text.num_hidden_layers
    kept = min(depth, max(MIN_TEXT_LAYERS, _layers_with_all_kinds(text, depth) + 1))
    kinds = getattr(text, "layer_types", None) or ()
    while kept < min(depth, len(kinds)) and kinds[kept - 1] in _OF_SINGLE_TOKENS:
        kept += 1
    for name, values in _lists(text):
        if len(values) == depth:
            setattr(text, name, type(values)(values[:kept]))
        elif _LAYER_NUMBERS.search(name) and all(type(number) is int for number in values):
            setattr(text, name, type(values)(number for number in values if number < kept))
    _lower(text, "num_kv_shared_layers", kept // 2)
    text.num_hidden_layers = kept


def _layers_with_all_kinds(text: PreTrainedConfig, depth: int) -> int:
    """How many layers from the first on have one of every kind."""
    kinds: list[tuple[Any, ...]] = [() for _ in range(depth)]
    for name, values in _lists(text):
        if len(values) == depth:
            kinds = [(*kind, value) for kind, value in zip(kinds, values, strict=True)]
        elif _LAYER_NUMBERS.search(name):
            kinds = [(*kind, layer in values) for layer, kind in enumerate(kinds)]
    for name in _FIRST_LAYERS:
        first = getattr(text, name, None)
        if isinstance(first, int):
            kinds = [(*kind, layer < first) for layer, kind in enumerate(kinds)]
    return 1 + max(kinds.index(kind) for kind in kinds)


def _lists(text: PreTrainedConfig) -> Iterator[tuple[str, list[Any] | tuple[Any, ...]]]:
    yield from ((name, value) for name, value in list(vars(text).items()) if isinstance(value, list | tuple))


def _narrow_text(config: PreTrainedConfig, text: PreTrainedConfig, *, width: bool) -> None:
    for name in vars(text):
        if "intermediate_size" in name:
            _lower(text, name, _INNER_WIDTH)
    for name, most in _SMALL.items():
        _lower(text, name, most)
    text.vocab_size = _VOCABULARY
    text.pad_token_id = None
    if width:
        _narrow_heads(config, text)


def _narrow_heads(config: PreTrainedConfig, text: PreTrainedConfig) -> None:
    """Fewer heads of the same size, grouped if they were, and the width that they make."""
    heads, old_width = text.num_attention_heads, text.hidden_size
    groups = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or old_width // heads
    text.num_key_value_heads = min(groups, 2)
    text.num_attention_heads = text.num_key_value_heads * min(heads // groups, 2)
    text.hidden_size = text.num_attention_heads * head_dim
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for name, value in list(vars(part).items()) if part is not None and part is not text else ():
            if value == old_width and _TEXT_WIDTH_ELSEWHERE.search(name):
                setattr(part, name, text.hidden_size)


def _cut_tower(config: PreTrainedConfig, model: nn.Module) -> None:
    if getattr(config, "vision_config", None) is not None:
        cut_tower(config, {len(module) for module in model.modules() if isinstance(module, nn.ModuleList)})


def _num_embeddings(model: PreTrainedModel) -> int:
    return model.get_input_embeddings().get_parameter("weight").shape[0]


def _restore_vocabulary(small: PreTrainedModel, num_embeddings: int) -> None:
    """Let every token have an embedding again: overlapping rows of one random vector, which cost no memory."""
    embeddings: Any = small.get_input_embeddings()
    width, device = embeddings.weight.shape[1], embeddings.weight.device
    values = torch.randn(num_embeddings + width, generator=torch.Generator().manual_seed(1)).to(device)
    rows = values.as_strided((num_embeddings, width), (1, 1))
    embeddings.weight = nn.Parameter(rows, requires_grad=False)
    embeddings.num_embeddings = num_embeddings
