"""From the messages of a request to token ids, processed media and the places where features go.

transformers' own processor does the work: its chat template, its image and video processors, its expansion of
placeholders, its tokenizer. It is called through a shallow copy whose parts are stand-ins, for one call:

- the image and video processors run on each item alone and remember the result by the item's content, so a
  picture that comes again costs nothing but the hash made when it was read;
- the tokenizer keeps typed control tokens apart (`control_tokens`);
- the placeholder expansion is watched: how many media tokens each item gets, and that placeholders and media
  match in number.

So for ordinary text the ids are the processor's own `apply_chat_template(..., tokenize=True)`; what a user typed
binds nothing. Videos: frames are used as `media` took them; see `media.video_metadata` for the equal direct call.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
import torch
from transformers import ProcessorMixin
from transformers.utils.chat_template_utils import _get_template_variables

from polylens.config import PROCESSED_ITEMS_BYTES, TEMPLATE_LIMIT_S
from polylens.core import MediaKind
from polylens.errors import InternalError, ModelLoadError, PolylensError, RequestError, first_line
from polylens.models.control_tokens import Escape, SafeTokenizer, control_tokens
from polylens.models.families import notes_for
from polylens.models.families.notes import FEATURE_IDS
from polylens.models.item_processor import ItemProcessor, ResultMemo, WholeProcessor
from polylens.models.media_settings import MediaSettings, takes_pixels
from polylens.models.prompt import parse_messages, plain_data, strings_in
from polylens.models.template_limit import TemplateTimeoutError, template_limit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from polylens.core import MediaItem
    from polylens.models.families.notes import ProcessorNotes

VIDEO_EXTRAS = ("second_per_grid_ts",)
"""What processors return once for each video beside the encoder's tensors, for positions."""

_RESERVED_VARIABLES = ("messages", "add_generation_prompt", "raise_exception", "strftime_now")
"""Template variables that are not the request's to set."""


@dataclass(frozen=True, eq=False)
class ProcessedItem:
    """One media item as the encoder takes it, processed alone.

    tensors: the arguments of `get_image_features`/`get_video_features`, e.g. `pixel_values` (P, d) and
    `image_grid_thw` (1, 3), or `pixel_values` (T, 3, h, w). num_tokens: its media tokens in the prompt, which is
    the number of feature rows. extras: tensors (1,) that positions need (`second_per_grid_ts`).
    """

    kind: MediaKind
    media_key: str
    settings_key: str
    tensors: dict[str, torch.Tensor]
    num_tokens: int
    extras: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


@dataclass(frozen=True)
class MediaSlot:
    """Where the features of `items[item_index]` go: runs (start, length) of token positions, in row order."""

    item_index: int
    positions: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt ready for the engine. Items and slots are in the order of their places in `token_ids`.

    inputs: instead of items and slots, all that the processor returned beside the ids, for transformers' own
    generation.
    """

    token_ids: list[int]
    items: list[ProcessedItem] = field(default_factory=list)
    slots: list[MediaSlot] = field(default_factory=list)
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)


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
        self._template_limit_s = None if beside is None else TEMPLATE_LIMIT_S
        self.tokenizer = processor.tokenizer
        self.notes = notes_for(getattr(config, "model_type", "")).processor
        self._commands = re.compile(self.notes.commands) if self.notes.commands else None
        self.template = _chat_template(processor, self.notes.chat_template)
        self.feature_ids = _feature_ids(processor, config, self.notes)
        media_tokens = [self.tokenizer.convert_ids_to_tokens(token_id) for token_id in self.feature_ids]
        placeholders = [text for text in (getattr(processor, f"{kind}_token", None) for kind in MediaKind) if text]
        self.control = control_tokens(self.tokenizer, self.template, media_tokens, placeholders)
        if unknown := set(media_tokens) - set(self.control.ids):
            raise ModelLoadError(f"the processor's media tokens {sorted(unknown)} are no added tokens of its tokenizer")
        shares_tokenizer = beside is not None and beside.tokenizer is self.tokenizer
        lock = beside.safe_tokenizer.lock if beside is not None and shares_tokenizer else None
        self.safe_tokenizer: SafeTokenizer = SafeTokenizer(self.tokenizer, self.control, media_tokens, lock)
        self.stop_token_ids = _stop_token_ids(self.tokenizer, config, generation_config)
        # Its keys hold the settings, so all may have the same one.
        self._memo: ResultMemo = ResultMemo(PROCESSED_ITEMS_BYTES) if beside is None else beside._memo
        self._settings = {kind: settings_text(getattr(processor, f"{kind}_processor", None)) for kind in MediaKind}
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
        """Whether the processor takes pictures; if not, the model is a language model."""
        return getattr(self.processor, "image_processor", None) is not None

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
        chat = parse_messages(messages, takes_videos=self.takes_videos, allow_paths=allow_paths, settings=settings)
        if chat.media and not self.takes_media:
            raise RequestError("this is a language model: it takes no pictures and videos", param="messages")
        variables = self._template_variables(chat_template_kwargs)
        rendered = self._in_template_form(chat.messages)
        escape = Escape(self.control, self.template, strings_in([rendered, variables]), self._commands)
        call = _Call(self, escape, chat.media, settings)
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

    def _checked_ids(self, token_ids: Sequence[Any]) -> list[int]:
        limit = len(self.tokenizer)
        for index, token_id in enumerate(token_ids):
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < limit:
                raise RequestError(f"prompt[{index}] must be a token id below {limit}, got {token_id!r}", "prompt")
        return list(token_ids)

    def _media_settings(self, given: Mapping[str, Any] | None) -> MediaSettings:
        settings = MediaSettings.parse(given)
        parts = [getattr(self.processor, f"{kind}_processor", None) for kind in MediaKind]
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
            with template_limit(self._template_limit_s):
                text = self.processor.apply_chat_template(messages, chat_template=self.template, tokenize=False)
        except TemplateTimeoutError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError):  # the answer is no
            return False
        return expected in text and f"'{expected}'" not in text

    def _assemble(self, ids: list[int], call: _Call) -> PreparedPrompt:
        items = call.placed_items()
        runs = _runs(ids, self.feature_ids, [item.num_tokens for item in items])
        if self.notes.feature_ids_entries:
            items = [_with_feature_ids(item, ids, run) for item, run in zip(items, runs, strict=True)]
        return PreparedPrompt(ids, items, [MediaSlot(index, run) for index, run in enumerate(runs)])


class _Call:
    """One call of the processor, with stand-ins for its parts."""

    def __init__(self, owner: Processing, escape: Escape, media: Sequence[MediaItem], settings: MediaSettings) -> None:
        self._owner = owner
        self._escape = escape
        self._media = media
        self._settings = settings
        self._counts: dict[MediaKind, list[int]] = {kind: [] for kind in MediaKind}
        self._order: list[MediaKind] = []
        self._output: Mapping[str, Any] = {}
        self._extras: dict[str, Any] = {}
        self._parts = {
            kind: self._part(kind, [item for item in media if item.kind is kind], settings) for kind in MediaKind
        }

    def _part(self, kind: MediaKind, items: list[MediaItem], settings: MediaSettings) -> Any:
        owner = self._owner
        real = getattr(owner.processor, f"{kind}_processor", None)
        size = settings.size_for(real)
        if owner.whole:
            return WholeProcessor(real, items, size)
        together = owner.notes.pictures_together and kind is MediaKind.IMAGE
        return ItemProcessor(real, owner._settings[kind], items, owner._memo, size, together=together)

    def run(self, use: Any) -> list[int]:
        """Call `use` with the processor's stand-in; returns the ids of its one conversation."""
        try:
            with template_limit(self._owner._template_limit_s):
                output = use(self._processor())
        except PolylensError:
            raise
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        except Exception as error:  # the border to templates and processors: they raise what they like on odd input
            line = first_line(error)
            raise RequestError(f"the model's processor refuses these messages: {line}", param="messages") from error
        self._output = output
        self._extras = {name: output[name] for name in VIDEO_EXTRAS if name in output}
        return list(output["input_ids"][0])

    def inputs(self) -> dict[str, torch.Tensor]:
        """All that the processor returned beside the ids. Raises RequestError where it did not take the media."""
        for kind, part in self._parts.items():
            if part.items and not any(name.startswith("pixel_values") for name in self._output):
                raise RequestError(f"the chat template places no {kind}s where the messages have them", "messages")
        return {name: torch.as_tensor(value) for name, value in self._output.items() if name != "input_ids"}

    def placed_items(self) -> list[ProcessedItem]:
        """The items in the order of their places in the text."""
        if self._media and not self._order:
            self._expand_alone()
        of_kind = {kind: self._processed_items(kind) for kind in MediaKind}
        if any(self._order.count(kind) != len(items) for kind, items in of_kind.items()):
            raise InternalError("the processor expanded other placeholders than those of the messages' media")
        remaining = {kind: iter(items) for kind, items in of_kind.items()}
        return [next(remaining[kind]) for kind in self._order]

    def _processed_items(self, kind: MediaKind) -> list[ProcessedItem]:
        part = self._parts[kind]
        if len(part.results) != len(part.items):
            raise RequestError(f"the chat template places no {kind}s where the messages have them", param="messages")
        return [
            ProcessedItem(
                kind=kind,
                media_key=item.key,
                settings_key=result.settings_key,
                tensors=self._encoder_tensors(result.outputs),
                num_tokens=self._counts[kind][index],
                extras=self._item_extras(index) if kind is MediaKind.VIDEO else {},
            )
            for index, (item, result) in enumerate(zip(part.items, part.results, strict=True))
        ]

    def _expand_alone(self) -> None:
        """Place the items where the processor expands placeholders by means of its own: ask for each item alone."""
        self._order = [item.kind for item in self._media]
        if len(set(self._order)) > 1:
            raise RequestError("this model's processor does not tell pictures from videos: send one kind", "messages")
        self._counts[self._order[0]] = [self._num_tokens_alone(item) for item in self._media]

    def _num_tokens_alone(self, item: MediaItem) -> int:
        """How many media tokens one placeholder becomes with this item."""
        placeholder = getattr(self._owner.processor, f"{item.kind}_token")
        media = {f"{item.kind}s": [[item.data]]}
        alone = _Call(self._owner, self._escape, [item], self._settings)
        ids = alone.run(lambda processor: processor(text=[placeholder], return_tensors=None, **media))
        return sum(ids.count(token_id) for token_id in self._owner.feature_ids)

    def _encoder_tensors(self, outputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Without what processors return for their own use (`num_crops`, `video_metadata`)."""
        notes = self._owner.notes
        unused = {*self._owner.processor.unused_input_names, *notes.dropped_inputs}
        return {
            name: value
            for name, value in outputs.items()
            if isinstance(value, torch.Tensor) and name not in unused and name not in VIDEO_EXTRAS
        }

    def _item_extras(self, index: int) -> dict[str, torch.Tensor]:
        return {name: torch.as_tensor([values[index]], dtype=torch.float32) for name, values in self._extras.items()}

    def _processor(self) -> Any:
        processor = copy.copy(self._owner.processor)
        processor.tokenizer = _CallTokenizer(self._owner.safe_tokenizer, self._escape)
        for kind, part in self._parts.items():
            if part.real is not None:
                setattr(processor, f"{kind}_processor", part)
        if self._owner.notes.flat_images:
            processor.prepare_inputs_layout = _with_flat_images(processor.prepare_inputs_layout)
        processor.validate_inputs = self._watched_validation(processor)
        processor.get_text_with_replacements = self._watched_expansion(processor)
        if self._owner.notes.plain_call and not self._owner.whole:
            processor.__class__ = _plainly_called(processor.__class__)
        return processor

    def _watched_expansion(self, processor: Any) -> Any:
        """The processor's expansion of placeholders, which also tells each item's place and number of media tokens."""
        expand = processor.get_text_with_replacements

        def expand_and_count(
            text: list[str],
            images_replacements: Sequence[str] = (),
            videos_replacements: Sequence[str] = (),
            *others: Any,
            **more: Any,
        ) -> Any:
            for kind, replacements in (
                (MediaKind.IMAGE, images_replacements),
                (MediaKind.VIDEO, videos_replacements),
            ):
                self._counts[kind] = [self._count_tokens(replacement) for replacement in replacements]
            self._order = self._kinds_in(text[0])
            return expand(text, list(images_replacements), list(videos_replacements), *others, **more)

        return expand_and_count

    def _watched_validation(self, processor: Any) -> Any:
        """The processor's own checks, after ours: not every family compares placeholders with media."""
        validate = processor.validate_inputs

        def check_and_validate(*inputs: Any, text: list[str], **more: Any) -> Any:
            for kind, part in self._parts.items():
                self._check_placeholders(text[0], kind, len(part.items))
            return validate(*inputs, text=text, **more)

        return check_and_validate

    def _check_placeholders(self, text: str, kind: MediaKind, num_items: int) -> None:
        placeholder = getattr(self._owner.processor, f"{kind}_token", None)
        num_placeholders = text.count(placeholder) if placeholder else 0
        if num_placeholders != num_items:
            raise RequestError(
                f"placeholders do not match: the chat template writes {num_placeholders} for {num_items} {kind}s "
                "(some templates take media in user messages only)",
                param="messages",
            )

    def _kinds_in(self, text: str) -> list[MediaKind]:
        """The kinds of the placeholders that have media, in the order of the text."""
        names = {kind: getattr(self._owner.processor, f"{kind}_token", None) for kind in MediaKind}
        wanted = {name: kind for kind, name in names.items() if name and self._parts[kind].items}
        pattern = "|".join(map(re.escape, wanted)) or "(?!)"
        return [wanted[found] for found in re.findall(pattern, text)]

    def _count_tokens(self, replacement: str) -> int:
        tokenizer = self._owner.tokenizer
        tokens = [tokenizer.convert_ids_to_tokens(token_id) for token_id in self._owner.feature_ids]
        return sum(replacement.count(token) for token in tokens)


class _CallTokenizer:
    """Stands in for the processor's tokenizer: the same attributes, safe encoding."""

    def __init__(self, safe: SafeTokenizer, escape: Escape) -> None:
        self._safe = safe
        self._escape = escape

    def __getattr__(self, name: str) -> Any:
        return getattr(self._safe.tokenizer, name)

    def __call__(self, text: str | list[str], **options: Any) -> _Ids:
        texts = [text] if isinstance(text, str) else text
        return _Ids(input_ids=[self._safe.encode(one, self._escape, options) for one in texts])


class _Ids(dict[str, Any]):
    """What the stand-in tokenizer returns."""

    def char_to_token(self, *_: int) -> int:
        """Idefics 3 asks where its placeholders lie, to mark token types if it is told to; here it is not."""
        return 0


def _runs(ids: Sequence[int], media_ids: Sequence[int], counts: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
    """Divide the positions of media tokens among items in order, `counts[i]` each, as runs (start, length)."""
    positions = np.flatnonzero(np.isin(ids, media_ids)) if media_ids else np.empty(0, dtype=np.int64)
    if len(positions) != sum(counts):
        raise InternalError(f"{len(positions)} media tokens in the ids for {sum(counts)} of the media")
    bounds = np.cumsum([0, *counts])
    return [_as_runs(positions[start:stop]) for start, stop in pairwise(bounds)]


def _as_runs(positions: np.ndarray) -> tuple[tuple[int, int], ...]:
    pieces = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
    return tuple((int(piece[0]), len(piece)) for piece in pieces if len(piece))


def _kinds_taken(processor: Any) -> list[MediaKind]:
    has_token = getattr(processor, "video_token", None) is not None
    takes_videos = has_token and getattr(processor, "video_processor", None) is not None
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


def _with_flat_images(prepare: Any) -> Any:
    def prepare_flat(images: Any = None, *others: Any, **more: Any) -> Any:
        return prepare([one for nested in images or () for one in nested] or None, *others, **more)

    return prepare_flat


@cache
def _plainly_called(processor_class: Any) -> type:
    return type(processor_class.__name__, (processor_class,), {"__call__": ProcessorMixin.__call__})


def _chat_template(processor: Any, default: str | None) -> str:
    template = getattr(processor, "chat_template", None) or getattr(processor.tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    template = template or default
    if not isinstance(template, str) or not template:
        raise ModelLoadError(
            "the model has no chat template (chat_template.jinja); use an instruction-tuned checkpoint"
        )
    return template


def settings_text(part: Any) -> str:
    """The settings of an image or video processor, equal where they are equal; "" for None."""
    return "" if part is None else f"{type(part).__name__}|{part.to_json_string()}"


def _stop_token_ids(tokenizer: Any, config: Any, generation_config: Any) -> tuple[int, ...]:
    """Every id that any part of the checkpoint says ends an answer, sorted."""
    text_config = config.get_text_config() if config is not None else None
    found: set[int] = set()
    for holder in (tokenizer, config, text_config, generation_config):
        value = getattr(holder, "eos_token_id", None)
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return tuple(sorted(found))
