"""From the messages of a request to token ids, processed media and the places where features go.

transformers' own processor does the work: its chat template, its image and video processors, its expansion of
placeholders, its tokenizer. It is called through a shallow copy whose parts are stand-ins, for one call
(`processor_call`):

- the image and video processors run on each item alone and remember the result by the item's content, so a
  picture that comes again costs nothing but the hash made when it was read;
- the tokenizer keeps typed control tokens apart (`control_tokens`);
- the placeholder expansion is watched: how many media tokens each item gets, and that placeholders and media
  match in number.

So for ordinary text the ids are the processor's own `apply_chat_template(..., tokenize=True)`; what a user typed
binds nothing. Videos: frames are used as `media` took them; see `media.video_metadata` for the equal direct call.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from polylens.config import PROCESSED_ITEMS_BYTES, TEMPLATE_LIMIT_S
from polylens.core import MediaKind
from polylens.errors import InternalError, ModelLoadError, RequestError
from polylens.models.chat_template import ChatTemplate, chat_template_of
from polylens.models.control_tokens import Escape, control_tokens
from polylens.models.families import notes_for
from polylens.models.families.notes import FEATURE_IDS
from polylens.models.item_processor import ResultMemo, kinds_taken, media_part, media_token
from polylens.models.media_settings import MediaSettings, takes_pixels
from polylens.models.prepared import MediaSlot, PreparedPrompt, ProcessedItem
from polylens.models.processor_call import ProcessorCall
from polylens.models.prompt import parse_messages, plain_data, strings_in
from polylens.models.safe_tokenizer import SafeTokenizer
from polylens.models.special_ids import decoder_start, feature_ids, stop_token_ids

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from polylens.core import MediaItem


class Processing:
    """One model's processor, made safe for user text and quick for repeated media. Thread-safe.

    `processor`: transformers' multimodal processor; `config` and `generation_config`: the model's. whole: prompts
    carry the processor's own output (`PreparedPrompt.inputs`) instead of items.
    beside: the model's own, for one that an adapter brings: what both have is shared, and the template, which is
    then a stranger's, has `TEMPLATE_LIMIT_S` to render.
    Raises ModelLoadError when there is no chat template or the tokenizer is no fast one.
    """

    def __init__(
        self,
        processor: Any,
        config: Any,
        generation_config: Any = None,
        *,
        whole: bool = False,
        beside: Processing | None = None,
    ) -> None:
        self.processor = processor
        self.whole = whole
        self.template_limit_s = None if beside is None else TEMPLATE_LIMIT_S
        self.tokenizer = processor.tokenizer
        self.notes = notes_for(getattr(config, "model_type", "")).processor
        if self.notes.no_chat is not None:
            raise ModelLoadError(f"the model cannot be asked in a conversation: {self.notes.no_chat}")
        self._commands = re.compile(self.notes.commands) if self.notes.commands else None
        self.template = chat_template_of(processor, self.notes.chat_template)
        self.feature_ids = feature_ids(processor, config, self.notes)
        media_tokens = [self.tokenizer.convert_ids_to_tokens(token_id) for token_id in self.feature_ids]
        placeholders = [text for text in (media_token(processor, kind) for kind in MediaKind) if text]
        self.control = control_tokens(self.tokenizer, self.template, media_tokens, placeholders, self.notes.pieces)
        if unknown := set(media_tokens) - set(self.control.ids):
            raise ModelLoadError(f"the processor's media tokens {sorted(unknown)} are no added tokens of its tokenizer")
        shares_tokenizer = beside is not None and beside.tokenizer is self.tokenizer
        lock = beside.safe_tokenizer.lock if beside is not None and shares_tokenizer else None
        self.safe_tokenizer: SafeTokenizer = SafeTokenizer(self.tokenizer, self.control, media_tokens, lock)
        self.stop_token_ids = stop_token_ids(self.tokenizer, config, generation_config, self.notes.stop_entries)
        self.start_token_id = decoder_start(config, generation_config)
        # Its keys hold the settings, so all may have the same one.
        self.memo: ResultMemo = ResultMemo(PROCESSED_ITEMS_BYTES) if beside is None else beside.memo
        self.part_settings = {kind: settings_text(media_part(processor, kind)) for kind in MediaKind}
        self._chat = ChatTemplate(processor, self.template, self.template_limit_s)

    @cached_property
    def num_token_ids(self) -> int:
        """One more than the tokenizer's largest id: the rows that embedding and head must have."""
        return max(self.tokenizer.get_vocab().values()) + 1

    @property
    def takes_media(self) -> bool:
        """Whether the processor takes pictures or videos; if not, the model is a language model."""
        return self.takes_pictures or self.takes_videos

    @property
    def takes_pictures(self) -> bool:
        return media_part(self.processor, MediaKind.IMAGE) is not None

    @property
    def takes_videos(self) -> bool:
        """Whether the processor takes videos; if not, they become sampled frames as pictures."""
        return MediaKind.VIDEO in kinds_taken(self.processor)

    def prepare(
        self,
        messages: Any,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        allow_paths: bool = True,
    ) -> PreparedPrompt:
        """Render, tokenise and process one conversation (see `prompt` for the form of messages).

        chat_template_kwargs: variables of the model's chat template. mm_processor_kwargs: see `MediaSettings`.
        allow_paths: whether media may name local files. Raises RequestError (MediaError for media) with one line
        that names what is wrong.
        """
        settings = self._media_settings(mm_processor_kwargs)
        chat = parse_messages(
            messages,
            takes_videos=self.takes_videos,
            allow_paths=allow_paths,
            settings=settings,
            num_frames=self.notes.num_frames,
        )
        if chat.media and not self.takes_media:
            raise RequestError("this is a language model: it takes no pictures and videos", param="messages")
        variables = self._chat.variables_from(chat_template_kwargs)
        rendered = self._chat.in_its_form(chat.messages)
        self._check_media(chat.media)
        escape = Escape(self.control, self.template, strings_in([rendered, variables]), self._commands)
        call = ProcessorCall(self, escape, chat.media, settings)
        ids = call.run(
            lambda processor: processor.apply_chat_template(
                escape.hide(rendered),
                chat_template=self.template,
                tokenize=True,
                return_dict=True,
                return_tensors=None,  # items of unequal sizes make no tensor
                add_generation_prompt=add_generation_prompt,
                **escape.hide(variables),
            )
        )
        return PreparedPrompt(ids, inputs=call.inputs()) if self.whole else self._assemble(ids, call)

    def count_media_tokens(self, ids: Sequence[int]) -> int:
        """How many of the ids are of tokens that features replace."""
        return sum(ids.count(token_id) for token_id in self.feature_ids)

    def prepare_text(self, prompt: str | Sequence[int]) -> PreparedPrompt:
        """Tokenise a raw prompt (no chat template, no media). It is user text: typed control tokens bind nothing.

        Token ids are taken as they are, media tokens among them as tokens without a picture.
        """
        if isinstance(prompt, list | tuple):
            return PreparedPrompt(self._checked_ids(prompt))
        if not isinstance(prompt, str):
            raise RequestError(
                f"prompt must be a string or a list of token ids, got {type(prompt).__name__}", param="prompt"
            )
        text: str = plain_data(prompt, "prompt")
        escape = Escape(self.control, self.template, [text])
        return PreparedPrompt(self.safe_tokenizer.encode(escape.hide(text), escape, {"add_special_tokens": True}))

    def _check_media(self, media: Sequence[MediaItem]) -> None:
        kind = "picture" if self.takes_pictures else "video"
        if not self.takes_pictures and any(item.kind is MediaKind.IMAGE for item in media):
            raise RequestError("this model takes videos only, no pictures", param="messages")
        if self.notes.one_picture and len(media) > 1:
            raise RequestError(f"this model takes one {kind} in a request, got {len(media)}", param="messages")

    def _checked_ids(self, token_ids: Sequence[Any]) -> list[int]:
        limit = len(self.tokenizer)
        for index, token_id in enumerate(token_ids):
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < limit:
                raise RequestError(f"prompt[{index}] must be a token id below {limit}, got {token_id!r}", "prompt")
        return list(token_ids)

    def _media_settings(self, given: Mapping[str, Any] | None) -> MediaSettings:
        settings = MediaSettings.parse(given)
        parts = [media_part(self.processor, kind) for kind in MediaKind]
        if settings.changes_size and not any(map(takes_pixels, parts)):
            raise RequestError(
                "this model scales pictures to a fixed size: mm_processor_kwargs has no min_pixels and max_pixels for "
                "it",
                param="mm_processor_kwargs",
            )
        return settings

    def _assemble(self, ids: list[int], call: ProcessorCall) -> PreparedPrompt:
        marks_t = call.media_marks(ids)
        items = call.placed_items(int(marks_t.sum()))
        runs = _runs(marks_t, [item.num_tokens for item in items])
        if self.notes.feature_ids_entries:
            items = [_with_feature_ids(item, ids, run) for item, run in zip(items, runs, strict=True)]
        return PreparedPrompt(ids, items, [MediaSlot(index, run) for index, run in enumerate(runs)])


def _runs(marks_t: np.ndarray, counts: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
    """Divide the positions of media tokens among items in order, `counts[i]` each, as runs (start, length)."""
    positions = np.flatnonzero(marks_t)
    if len(positions) != sum(counts):
        raise InternalError(f"{len(positions)} media tokens in the ids for {sum(counts)} of the media")
    bounds = np.cumsum([0, *counts])
    return [_as_runs(positions[start:stop]) for start, stop in pairwise(bounds)]


def _as_runs(positions: np.ndarray) -> tuple[tuple[int, int], ...]:
    pieces = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
    return tuple((int(piece[0]), len(piece)) for piece in pieces if len(piece))


def _with_feature_ids(item: ProcessedItem, ids: Sequence[int], runs: Sequence[tuple[int, int]]) -> ProcessedItem:
    its_ids = torch.tensor([token_id for start, length in runs for token_id in ids[start : start + length]])
    return replace(item, tensors={**item.tensors, FEATURE_IDS: its_ids})


def settings_text(part: Any) -> str:
    """The settings of an image or video processor, equal where they are equal; "" for None."""
    return "" if part is None else f"{type(part).__name__}|{part.to_json_string()}"
