"""Cut a vision tower's config to few blocks, such that every kind of block and every output level stays.

Blocks kept: the first, the last, and those the config names by number (full-attention blocks, deepstack levels,
the hidden states taken as features). All such numbers are rewritten to the blocks' new places.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_DEPTH_NAMES = ("depth", "num_hidden_layers", "num_layers")
_BLOCK_NUMBERS = re.compile(r"(?:index|indexes|indices)$")
_FEATURE_LAYERS = ("vision_feature_layer", "vision_feature_layers", "spatial_vision_layer")
_FEATURE_PAIRS = "deepstack_layer_map"
"""Pairs of a hidden state taken as features and the text layer they enter (Granite 4 Vision)."""
_BLOCK_BEFORE = "insert_layer_id"
"""The block after which something else comes (MiniCPM-V's merger)."""


def cut_tower(config: PreTrainedConfig, list_lengths: Collection[int]) -> tuple[int, ...] | None:
    """Cut the tower in a model's `config` (changed in place); returns the blocks kept.

    Of a config entry that lists blocks, the first and last are kept, or all where modules are listed alongside
    (`list_lengths` has its length: one merger for each deepstack level). None, and nothing is changed, where the
    depth is not known by name, a number is out of range or nothing is left to cut.
    """
    vision = config.vision_config
    depth_name = next((name for name in _DEPTH_NAMES if isinstance(getattr(vision, name, None), int)), None)
    if depth_name is None:
        return None
    depth = getattr(vision, depth_name)
    kept = _blocks_to_keep(config, depth, list_lengths)
    if len(kept) >= depth or kept[0] < 0 or kept[-1] >= depth:
        return None
    renumbered = {
        name: type(numbers)(kept.index(number) for number in numbers if number in kept)
        for name, numbers in _numbered(vision).items()
    }
    per_block = {name: [values[number] for number in kept] for name, values in _per_block(vision, depth).items()}
    for name, value in {**renumbered, **per_block, depth_name: len(kept)}.items():
        setattr(vision, name, value)
    for owner, name, layers in _feature_layers(config):
        new = [_feature_layer(layer, kept, depth) for layer in _as_list(layers)]
        setattr(owner, name, new[0] if isinstance(layers, int) else type(layers)(new))
    if pairs := getattr(config, _FEATURE_PAIRS, None):
        setattr(config, _FEATURE_PAIRS, [(_feature_layer(layer, kept, depth), text) for layer, text in pairs])
    for owner, blocks in _feature_blocks(config):
        owner.vision_feature_layer = [kept.index(block % depth) for block in blocks]
    for owner in _with_block_before(config):
        setattr(owner, _BLOCK_BEFORE, kept.index(getattr(owner, _BLOCK_BEFORE)))
    return tuple(kept)


def _blocks_to_keep(config: PreTrainedConfig, depth: int, list_lengths: Collection[int]) -> list[int]:
    kept = {0, depth - 1}
    for numbers in _numbered(config.vision_config).values():
        kept |= set(numbers) if len(numbers) in list_lengths else {*numbers[:1], *numbers[-1:]}
    taken = [layer for _, _, layers in _feature_layers(config) for layer in _as_list(layers)]
    taken += [layer for layer, _ in getattr(config, _FEATURE_PAIRS, None) or ()]
    before = [getattr(owner, _BLOCK_BEFORE) for owner in _with_block_before(config)]
    before += [block % depth for _, blocks in _feature_blocks(config) for block in blocks]
    for block in (*(_block_of(layer, depth) for layer in taken), *before):
        kept |= {block, block + 1} & set(range(depth))  # the next one has no effect if no later one is taken
    return sorted(kept)


def _numbered(vision: PreTrainedConfig) -> dict[str, list[int] | tuple[int, ...]]:
    """Entries that list blocks by number."""
    return {
        name: value
        for name, value in vars(vision).items()
        if _BLOCK_NUMBERS.search(name) and isinstance(value, list | tuple) and all(type(v) is int for v in value)
    }


def _with_block_before(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    return [owner for owner in (config, config.vision_config) if hasattr(owner, _BLOCK_BEFORE)]


def _per_block(vision: PreTrainedConfig, depth: int) -> dict[str, list[Any]]:
    """Entries that list one value for each block."""
    lists = {name: value for name, value in vars(vision).items() if isinstance(value, list) and len(value) == depth}
    return {name: value for name, value in lists.items() if name not in _numbered(vision)}


def _feature_layers(config: PreTrainedConfig) -> list[tuple[PreTrainedConfig, str, int | list[int] | tuple[int, ...]]]:
    """Entries that name the hidden states taken as features, with the config they are in."""
    owners = (config, config.vision_config)
    found = [(owner, name, getattr(owner, name, None)) for owner in owners for name in _FEATURE_LAYERS]
    return [(owner, name, layers) for owner, name, layers in found if layers is not None]


def _feature_blocks(config: PreTrainedConfig) -> list[tuple[PreTrainedConfig, list[int]]]:
    """Blocks whose outputs are taken as features, with the config that numbers them so (Molmo 2's adapter)."""
    owner = getattr(config, "adapter_config", None)
    blocks = getattr(owner, "vision_feature_layer", None)
    return [] if owner is None or blocks is None else [(owner, list(blocks))]


def _as_list(layers: int | list[int] | tuple[int, ...]) -> list[int]:
    return [layers] if isinstance(layers, int) else list(layers)


def _block_of(feature_layer: int, depth: int) -> int:
    """The block whose output is hidden state `feature_layer` (0: the embeddings, before block 0; -1: the last)."""
    return feature_layer - 1 if feature_layer >= 0 else depth + feature_layer


def _feature_layer(layer: int, kept: Sequence[int], depth: int) -> int:
    """The same hidden state's number after the cut, counted from the same end."""
    if _block_of(layer, depth) < 0:
        return 0
    position = kept.index(_block_of(layer, depth))
    return position + 1 if layer > 0 else position - len(kept)
