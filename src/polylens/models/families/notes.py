"""What transformers does not tell generically about a family: the fields of one entry, and their defaults.

A hook that needs more than a line lives in a module of this package named after its family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, cat

from polylens.core import MediaKind

if TYPE_CHECKING:
    from polylens.models.features import ItemFeatures
    from polylens.models.text import TextStep


class TwoWay(StrEnum):
    """Which tokens of a prompt see later ones. Such a block is computed in one chunk and cached whole or not at all."""

    NONE = "none"
    """Plain causal attention."""
    IMAGES = "images"
    """The tokens of one image see each other."""
    ALL_IMAGES = "all images"
    """The tokens of all images see each other, those that bound images and their rows among them."""
    PROMPT = "prompt"
    """The whole prompt is one block."""


Collate = Callable[[Sequence[Mapping[str, Tensor]]], dict[str, Tensor]]
"""Packs several items' processor outputs as one encoder batch."""
Encode = Callable[[Any, MediaKind, Mapping[str, Tensor]], Any]
"""(the model without its head, kind, batch) -> the encoder's output, as `read_features` takes it."""
ReadFeatures = Callable[[Any, Sequence[int]], "list[ItemFeatures]"]
"""(the encoder's output, media tokens of each item) -> features of each item. Raises InternalError on other counts."""
Embed = Callable[[Any, Tensor, Tensor], Tensor]
"""(the model without its head, (t,) token ids, (t, d) their rows of the embedding) -> (t, d) what they embed as."""
TextArguments = Callable[["TextStep"], dict[str, Any]]
"""Further keyword arguments of the text model for one step."""


def pad_and_concat(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate along the first dimension; the others are padded with zeros to the largest item's.

    An item may lack a tensor (DeepSeek-OCR 2's small pictures have no tiles).
    """
    names = dict.fromkeys(name for item in items for name in item)
    return {name: _padded([item[name] for item in items if name in item]) for name in names}


def _padded(tensors: Sequence[Tensor]) -> Tensor:
    largest = [max(sizes) for sizes in zip(*(x.shape[1:] for x in tensors), strict=True)]
    return cat([F.pad(x, _missing(x, largest)) if list(x.shape[1:]) != largest else x for x in tensors])


def _missing(x: Tensor, largest: Sequence[int]) -> list[int]:
    """`F.pad`'s amounts: (before, after) of the last dimension first."""
    pairs = [(0, most - size) for most, size in zip(largest, x.shape[1:], strict=True)]
    return [amount for pair in reversed(pairs) for amount in pair]


def get_features(inner: Any, kind: MediaKind, batch: Mapping[str, Tensor]) -> Any:
    """transformers' own `get_image_features` or `get_video_features`; without the latter, videos are pictures."""
    run = getattr(inner, f"get_{kind}_features", None) or inner.get_image_features
    return run(**batch, return_dict=True)


CallProcessor = Callable[..., Mapping[str, Any]]
"""(the processor, its own call, the rendered text, pictures, further options of the call) -> the processor's output."""

FEATURE_IDS = "feature_ids"


def _always(_: Any) -> bool:
    return True


@dataclass(frozen=True)
class ProcessorNotes:
    """Facts about one family's processor.

    chat_template: used where a checkpoint has none; None: such a checkpoint is refused.
    commands: pattern of tokens that users type on purpose (tasks, places); all others that they type are plain text.
    feature_ids_entries: config entries with further ids of tokens that features replace. Where there are any, each
    item has the ids of all its tokens (n,) among its tensors, as FEATURE_IDS, for `encode`.
    dropped_inputs: tensors that no encoder takes although the processor does not say so.
    listed_inputs: lists of numbers that the encoder takes; items have them as tensors.
    flat_images: whether the processor takes pictures as one list, not as a list a conversation.
    pictures_together: whether a lone picture is processed otherwise than one of several in a conversation.
    plain_call: whether to pass over what the processor's own `__call__` adds (it only merges pixels of all media,
    which are kept by item here).
    written_out: whether the chat template itself writes all tokens of the pictures, equally many for each.
    no_chat: why the processor takes no conversation: such a model is refused.
    one_picture: whether a request has one picture (or video, where the model takes no pictures) at most, whose tokens
    (if it has any) the processor places itself.
    num_frames: how many frames the model takes of any video; None: as many as a request wants.
    call: how the processor is called, where it takes other arguments than a rendered text with placeholders and a
    list of pictures.
    item_inputs: what the processor returns beside a picture's own tensors that its encoder takes (the question).
    media_mask: the processor's output that is 1 at media tokens, where no token id tells them.
    stop_entries: entries of the text config with further ids that end an answer.
    pieces: ordinary pieces of the vocabulary that mean structure: control tokens as well, which no user types.
    """

    chat_template: str | None = None
    commands: str | None = None
    feature_ids_entries: tuple[str, ...] = ()
    dropped_inputs: tuple[str, ...] = ()
    listed_inputs: tuple[str, ...] = ()
    flat_images: bool = False
    pictures_together: bool = False
    plain_call: bool = False
    written_out: bool = False
    no_chat: str | None = None
    one_picture: bool = False
    num_frames: int | None = None
    call: CallProcessor | None = None
    item_inputs: tuple[str, ...] = ()
    media_mask: str | None = None
    stop_entries: tuple[str, ...] = ()
    pieces: tuple[str, ...] = ()


@dataclass(frozen=True)
class FamilyNotes:
    """Facts about one family (`config.model_type`).

    matmul_parameters: names of bare 2-D parameters (in, out) that act as linear layers, y = x W.
    two_way, two_way_in_windows_only: see `TwoWay`; the latter where only sliding-window layers look both ways.
    two_way_beyond_windows: whether tokens that see each other do so however far apart they are, sliding windows or not.
    two_way_when: whether `two_way` holds for a text model's config.
    first_position: position of a prompt's first token, for families without `get_rope_index`.
    collate, encode, read_features: how items become an encoder batch and its output their features; None: the
    defaults of `encoder`.
    features_are_added: whether features are added to the embeddings of media tokens, which they replace elsewhere.
    media_embed_as_padding: whether media tokens without features, which a model may generate, count as padding.
    media_embed_as_first: whether they count as the vocabulary's first token.
    embed: for models with a further table for some tokens; its layers, which the encoder has too, then belong to a
    prompt's text as well.
    prepare_text: changes to the text model that the ragged batch needs, made once at load; None: none.
    text_arguments: what the text model is given beside embeddings and positions; None: deepstack features, if any.
    not_adaptable: layer-name patterns (`re.search`) and what such layers are, for a refusal: those whose rows the
    routing cannot tell.
    hosted: why the text model cannot run in ragged batches, where it is not told by what it is made of.
    refused: why no model of the family is served; None: it is.
    never_answered: ids of tokens that the model itself keeps from being answered, of a model's config.
    processor: see `ProcessorNotes`.
    """

    matmul_parameters: tuple[str, ...] = ()
    two_way: TwoWay = TwoWay.NONE
    two_way_in_windows_only: bool = False
    two_way_beyond_windows: bool = False
    two_way_when: Callable[[Any], bool] = _always
    first_position: int = 0
    collate: Collate = pad_and_concat
    encode: Encode = get_features
    read_features: ReadFeatures | None = None
    features_are_added: bool = False
    media_embed_as_padding: bool = False
    media_embed_as_first: bool = False
    embed: Embed | None = None
    prepare_text: Callable[[Any], None] | None = None
    text_arguments: TextArguments | None = None
    not_adaptable: Mapping[str, str] = field(default_factory=dict)
    never_answered: Callable[[Any], Sequence[int]] | None = None
    hosted: str | None = None
    refused: str | None = None
    processor: ProcessorNotes = ProcessorNotes()
