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

import jinja2
import numpy as np
import torch
from transformers.utils.chat_template_utils import _get_template_variables

from polylens.config import PROCESSED_ITEMS_BYTES, TEMPLATE_LIMIT_S
from polylens.core import MediaKind
from polylens.errors import InternalError, ModelLoadError, RequestError
from polylens.models.control_tokens import Escape, SafeTokenizer, control_tokens
from polylens.models.families import notes_for
from polylens.models.families.notes import FEATURE_IDS
from polylens.models.item_processor import ResultMemo, media_part, media_token
from polylens.models.media_settings import MediaSettings, takes_pixels
from polylens.models.prepared import MediaSlot, PreparedPrompt, ProcessedItem
from polylens.models.processor_call import ProcessorCall
from polylens.models.prompt import parse_messages, plain_data, strings_in
from polylens.models.template_limit import TemplateTimeoutError, template_limit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from polylens.core import MediaItem
    from polylens.models.families.notes import ProcessorNotes

_RESERVED_VARIABLES = ("messages", "add_generation_prompt", "raise_exception", "strftime_now")
"""Template variables that are not the request's to set."""


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
        self.template = _chat_template(processor, self.notes.chat_template)
        self.feature_ids = _feature_ids(processor, config, self.notes)
        media_tokens = [self.tokenizer.convert_ids_to_tokens(token_id) for token_id in self.feature_ids]
        placeholders = [text for text in (media_token(processor, kind) for kind in MediaKind) if text]
        self.control = control_tokens(self.tokenizer, self.template, media_tokens, placeholders, self.notes.pieces)
        if unknown := set(media_tokens) - set(self.control.ids):
            raise ModelLoadError(f"the processor's media tokens {sorted(unknown)} are no added tokens of its tokenizer")
        shares_tokenizer = beside is not None and beside.tokenizer is self.tokenizer
        lock = beside.safe_tokenizer.lock if beside is not None and shares_tokenizer else None
        self.safe_tokenizer: SafeTokenizer = SafeTokenizer(self.tokenizer, self.control, media_tokens, lock)
        self.stop_token_ids = _stop_token_ids(self.tokenizer, config, generation_config, self.notes.stop_entries)
        self.start_token_id = _decoder_start(config, generation_config)
        # Its keys hold the settings, so all may have the same one.
        self.memo: ResultMemo = ResultMemo(PROCESSED_ITEMS_BYTES) if beside is None else beside.memo
        self.part_settings = {kind: settings_text(media_part(processor, kind)) for kind in MediaKind}
        self._variables = sorted(
            _get_template_variables(self.template) - set(_RESERVED_VARIABLES) - set(self.tokenizer.special_tokens_map)
        )
        self._takes_strings = self._renders("probe", "probe")
        self._takes_parts = self._renders([{"type": "text", "text": "probe"}], "probe")
        if not (self._takes_strings or self._takes_parts):
            raise ModelLoadError("the model's chat template does not write a user's text; is it for this model?")

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
        return MediaKind.VIDEO in _kinds_taken(self.processor)

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
        variables = self._template_variables(chat_template_kwargs)
        rendered = self._in_template_form(chat.messages)
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

    def _template_variables(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Only variables the template reads: transformers would pass others on as processor settings."""
        for name in given or {}:
            if name not in self._variables:
                known = ", ".join(self._variables) or "none"
                raise RequestError(
                    f"the chat template has no variable {name!r} to set; it has: {known}", param="chat_template_kwargs"
                )
        return plain_data(dict(given or {}), "chat_template_kwargs")

    def _in_template_form(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Contents as strings or as parts, as far as the template takes only one of them."""
        return [
            {**message, "content": self._content_form(message["content"])} if "content" in message else message
            for message in messages
        ]

    def _content_form(self, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        # transformers hands templates an empty list for an empty string, which some of them cannot take
        if isinstance(content, str) and (not self._takes_strings or (not content and self._takes_parts)):
            return [{"type": "text", "text": content}]
        if isinstance(content, list) and not self._takes_parts:
            if any(part["type"] != "text" for part in content):
                raise RequestError("this model's chat template takes text only, no pictures or videos", "messages")
            return "\n".join(part["text"] for part in content)
        return content

    def _renders(self, content: Any, expected: str) -> bool:
        """Whether the template writes such content as text (and not as a Python list, or not at all)."""
        messages = [{"role": "user", "content": content}]
        try:
            with template_limit(self.template_limit_s):
                text = self.processor.apply_chat_template(messages, chat_template=self.template, tokenize=False)
        except TemplateTimeoutError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError):  # the answer is no
            return False
        return expected in text and f"'{expected}'" not in text

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


def _kinds_taken(processor: Any) -> list[MediaKind]:
    has_token = media_token(processor, MediaKind.VIDEO) is not None
    takes_videos = has_token and media_part(processor, MediaKind.VIDEO) is not None
    return [MediaKind.IMAGE, MediaKind.VIDEO] if takes_videos else [MediaKind.IMAGE]


def _feature_ids(processor: Any, config: Any, notes: ProcessorNotes) -> list[int]:
    """Ids of the tokens that features replace: the model's own, as processors may name others beside them."""
    named = [getattr(config, f"{kind}_token_id", None) for kind in _kinds_taken(processor)]
    if not any(named):
        named = [token_id for kind in MediaKind for token_id in getattr(processor, f"{kind}_token_ids", ())]
    more = [token_id for entry in notes.feature_ids_entries for token_id in getattr(config, entry)]
    return list(dict.fromkeys(token_id for token_id in (*named, *more) if token_id is not None))


def _with_feature_ids(item: ProcessedItem, ids: Sequence[int], runs: Sequence[tuple[int, int]]) -> ProcessedItem:
    its_ids = torch.tensor([token_id for start, length in runs for token_id in ids[start : start + length]])
    return replace(item, tensors={**item.tensors, FEATURE_IDS: its_ids})


def _chat_template(processor: Any, default: str | None) -> str:
    template = getattr(processor, "chat_template", None) or getattr(processor.tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    template = template or default
    if not isinstance(template, str) or not template:
        raise ModelLoadError(
            "the model has no chat template (chat_template.jinja); use an instruction-tuned checkpoint, or give one "
            "(chat_template=, --chat-template)"
        )
    return template


def settings_text(part: Any) -> str:
    """The settings of an image or video processor, equal where they are equal; "" for None."""
    return "" if part is None else f"{type(part).__name__}|{part.to_json_string()}"


def _decoder_start(config: Any, generation_config: Any) -> int | None:
    """The first token of every answer of an encoder-decoder."""
    text_config = config.get_text_config(decoder=True) if config is not None else None
    for holder in (generation_config, config, text_config):
        for name in ("decoder_start_token_id", "bos_token_id"):
            if (token_id := getattr(holder, name, None)) is not None:
                return token_id
    return None


def _stop_token_ids(
    tokenizer: Any, config: Any, generation_config: Any, more_entries: Sequence[str] = ()
) -> tuple[int, ...]:
    """Every id that any part of the checkpoint says ends an answer, sorted."""
    text_config = config.get_text_config() if config is not None else None
    found: set[int] = {getattr(text_config, entry) for entry in more_entries}
    for holder in (tokenizer, config, text_config, generation_config):
        value = getattr(holder, "eos_token_id", None)
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return tuple(sorted(found))
