"""One call of transformers' processor, through a shallow copy whose parts are stand-ins.

See `processing` for what each of them is for.
"""

from __future__ import annotations

import copy
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
import torch

from polylens.core import MediaKind
from polylens.errors import InternalError, PolylensError, RequestError, first_line
from polylens.models.item_processor import ItemProcessor, WholeProcessor, media_part, media_token
from polylens.models.prepared import PIXEL_PREFIX, ProcessedItem
from polylens.models.processor_stand_ins import CallTokenizer, RestoredText, called_by, plainly_called, with_flat_images
from polylens.models.template_limit import template_limit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from polylens.core import MediaItem
    from polylens.models.control_tokens import Escape
    from polylens.models.media_settings import MediaSettings
    from polylens.models.processing import Processing

VIDEO_EXTRAS = ("second_per_grid_ts", "video_second_per_grid")
"""What processors return once for each video beside the encoder's tensors, for positions."""
_PIXELS = (PIXEL_PREFIX, "flattened_patches")
"""What processors call pixels."""
_TEXT_IDS = ("input_ids", "decoder_input_ids", "labels")
"""What processors call the ids of the text."""


class ProcessorCall:
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
        real = media_part(owner.processor, kind)
        size = settings.size_for(real)
        if owner.whole:
            return WholeProcessor(real, items, size)
        together = owner.notes.pictures_together and kind is MediaKind.IMAGE
        return ItemProcessor(real, owner.part_settings[kind], items, owner.memo, size, together=together)

    def run(self, use: Any) -> list[int]:
        """Call `use` with the processor's stand-in; returns the ids of its one conversation."""
        try:
            with template_limit(self._owner.template_limit_s):
                output = use(self._processor())
        except PolylensError:
            raise
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        except Exception as error:  # the border to templates and processors: they raise what they like on odd input
            line = first_line(error)
            raise RequestError(f"the model's processor refuses these messages: {line}", param="messages") from error
        self._output = {name: _of_one_text(value) for name, value in output.items()}
        prompts = self._output.get("input_ids", ())
        if len(prompts) > 1:
            raise RequestError(
                f"the model's processor makes {len(prompts)} prompts of one conversation: it is not for chat",
                param="messages",
            )
        self._extras = {name: output[name] for name in VIDEO_EXTRAS if name in output}
        return self._token_ids()

    def _token_ids(self) -> list[int]:
        """The text's ids, under one of the names that processors give them; without text, where a decoder starts."""
        for name in _TEXT_IDS:
            ids = self._output.get(name)
            if ids is not None and len(ids[0]):
                return torch.as_tensor(ids[0]).tolist()
        start = self._owner.start_token_id
        if start is None:
            raise RequestError("the messages have no text to go on from", param="messages")
        return [start]

    def media_marks(self, ids: Sequence[int]) -> np.ndarray:
        """(n,) bool: which of the tokens features replace."""
        mask = self._owner.notes.media_mask
        if mask is None:
            return np.isin(ids, self._owner.feature_ids)
        return np.asarray(self._output[mask][0]) == 1 if mask in self._output else np.zeros(len(ids), dtype=bool)

    def inputs(self) -> dict[str, torch.Tensor]:
        """All that the processor returned beside the ids. Raises RequestError where it did not take the media."""
        for kind, part in self._parts.items():
            if part.items and not any(name.startswith(_PIXELS) for name in self._output):
                raise RequestError(f"the chat template places no {kind}s where the messages have them", "messages")
        return {name: torch.as_tensor(value) for name, value in self._output.items() if name not in _TEXT_IDS}

    def placed_items(self, num_marked: int) -> list[ProcessedItem]:
        """The items in the order of their places in the text, which has so many media tokens."""
        if self._owner.notes.one_picture:
            self._order = [item.kind for item in self._media]
            self._counts.update({kind: [num_marked] for kind in self._order})
        elif self._media and self._owner.notes.written_out:
            self._share_tokens(num_marked)
        elif self._media and not self._order:
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
                settings_key=result.settings_key + self._inputs_key,
                tensors=self._encoder_tensors(result.outputs) | self._item_inputs,
                num_tokens=self._counts[kind][index],
                extras=self._item_extras(index) if kind is MediaKind.VIDEO else {},
            )
            for index, (item, result) in enumerate(zip(part.items, part.results, strict=True))
        ]

    def _share_tokens(self, num_marked: int) -> None:
        """Place the items where the chat template writes their tokens: equally many for each."""
        num_tokens, rest = divmod(num_marked, len(self._media))
        if rest or not num_tokens:
            raise RequestError("the chat template places no images where the messages have them", param="messages")
        self._order = [item.kind for item in self._media]
        self._counts[MediaKind.IMAGE] = [num_tokens] * len(self._media)

    def _expand_alone(self) -> None:
        """Place the items where the processor expands placeholders by means of its own: ask for each item alone."""
        self._order = [item.kind for item in self._media]
        if len(set(self._order)) > 1:
            raise RequestError("this model's processor does not tell pictures from videos: send one kind", "messages")
        self._counts[self._order[0]] = [self._num_tokens_alone(item) for item in self._media]

    def _num_tokens_alone(self, item: MediaItem) -> int:
        """How many media tokens one placeholder becomes with this item."""
        placeholder = media_token(self._owner.processor, item.kind)
        media = {f"{item.kind}s": [[item.data]]}
        alone = ProcessorCall(self._owner, self._escape, [item], self._settings)
        ids = alone.run(lambda processor: processor(text=[placeholder], return_tensors=None, **media))
        return self._owner.count_media_tokens(ids)

    def _encoder_tensors(self, outputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Without what processors return for their own use (`num_crops`, `video_metadata`)."""
        notes = self._owner.notes
        unused = {*self._owner.processor.unused_input_names, *notes.dropped_inputs}
        listed = {name: torch.tensor(outputs[name]) for name in notes.listed_inputs}
        return listed | {
            name: value
            for name, value in outputs.items()
            if isinstance(value, torch.Tensor) and name not in unused and name not in VIDEO_EXTRAS
        }

    @cached_property
    def _item_inputs(self) -> dict[str, torch.Tensor]:
        return {name: torch.as_tensor(self._output[name]) for name in self._owner.notes.item_inputs}

    @property
    def _inputs_key(self) -> str:
        """Of those inputs that the picture alone does not tell."""
        told = {name: value for name, value in self._item_inputs.items() if not name.startswith(PIXEL_PREFIX)}
        return "".join(f"|{name}={value.tolist()}" for name, value in told.items())

    def _item_extras(self, index: int) -> dict[str, torch.Tensor]:
        return {name: torch.as_tensor([values[index]], dtype=torch.float32) for name, values in self._extras.items()}

    def _processor(self) -> Any:
        processor = copy.copy(self._owner.processor)
        processor.tokenizer = CallTokenizer(self._owner.safe_tokenizer, self._escape)
        if hasattr(processor, "qformer_tokenizer"):
            processor.qformer_tokenizer = RestoredText(processor.qformer_tokenizer, self._escape)
        for kind, part in self._parts.items():
            if part.real is not None:
                setattr(processor, f"{kind}_processor", part)
        if self._owner.notes.flat_images:
            processor.prepare_inputs_layout = with_flat_images(processor.prepare_inputs_layout)
        processor.validate_inputs = self._watched_validation(processor)
        processor.get_text_with_replacements = self._watched_expansion(processor)
        if self._owner.notes.plain_call and not self._owner.whole:
            processor.__class__ = plainly_called(processor.__class__)
        if self._owner.notes.call is not None:
            processor.__class__ = called_by(self._owner.notes.call, processor.__class__)
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

        def check_and_validate(*inputs: Any, text: Any, **more: Any) -> Any:
            for kind, part in self._parts.items() if text is not None else ():
                self._check_placeholders(text if isinstance(text, str) else text[0], kind, len(part.items))
            return validate(*inputs, text=text, **more)

        return check_and_validate

    def _check_placeholders(self, text: str, kind: MediaKind, num_items: int) -> None:
        if self._owner.notes.written_out:
            return
        placeholder = media_token(self._owner.processor, kind)
        if placeholder is None and self._owner.notes.one_picture:
            return
        num_placeholders = text.count(placeholder) if placeholder else 0
        if num_placeholders != num_items:
            raise RequestError(
                f"placeholders do not match: the chat template writes {num_placeholders} for {num_items} {kind}s "
                "(some templates take media in user messages only)",
                param="messages",
            )

    def _kinds_in(self, text: str) -> list[MediaKind]:
        """The kinds of the placeholders that have media, in the order of the text."""
        names = {kind: media_token(self._owner.processor, kind) for kind in MediaKind}
        wanted = {name: kind for kind, name in names.items() if name and self._parts[kind].items}
        pattern = "|".join(map(re.escape, wanted)) or "(?!)"
        return [wanted[found] for found in re.findall(pattern, text)]

    def _count_tokens(self, replacement: str) -> int:
        tokenizer = self._owner.tokenizer
        tokens = [tokenizer.convert_ids_to_tokens(token_id) for token_id in self._owner.feature_ids]
        return sum(replacement.count(token) for token in tokens)


def _of_one_text(value: Any) -> Any:
    """As a batch of one, where a processor returns the ids, or the mask, of one text alone."""
    return [value] if isinstance(value, list) and value and isinstance(value[0], int) else value
