"""Stand-ins for a processor's tokenizers and methods, for one call of it."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import ProcessorMixin

if TYPE_CHECKING:
    from polylens.models.control_tokens import Escape
    from polylens.models.families.notes import CallProcessor
    from polylens.models.safe_tokenizer import SafeTokenizer


class CallTokenizer:
    """Stands in for the processor's tokenizer: the same attributes, safe encoding."""

    def __init__(self, safe: SafeTokenizer, escape: Escape) -> None:
        self._safe = safe
        self._escape = escape

    def __getattr__(self, name: str) -> Any:
        return getattr(self._safe.tokenizer, name)

    def restored(self, text: str) -> str:
        """The text as the user wrote it."""
        return self._escape.restore(text)

    def __call__(self, text: str | list[str], **options: Any) -> _Ids:
        as_tensors = options.get("return_tensors") == "pt"
        texts = [text] if isinstance(text, str) else text
        ids = [self._safe.encode(one, self._escape, options | _AS_LISTS) for one in texts]
        masks = [[1] * len(one) for one in ids]
        if as_tensors:
            return _Ids(input_ids=torch.tensor(ids), attention_mask=torch.tensor(masks))
        flat = isinstance(text, str)
        found = {"input_ids": ids, "attention_mask": masks}
        if options.get("return_token_type_ids"):  # PaliGemma's processor: 0 is what sees itself both ways
            found["token_type_ids"] = [[0] * len(one) for one in ids]
        return _Ids({name: lists[0] if flat else lists for name, lists in found.items()})


_AS_LISTS = {"return_tensors": None}


class _Ids(dict[str, Any]):
    """What the stand-in tokenizer returns."""

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        return self["attention_mask"]

    def char_to_token(self, *_: int) -> int:
        """Idefics 3 asks where its placeholders lie, to mark token types if it is told to; here it is not."""
        return 0


class RestoredText:
    """Stands in for the tokenizer of a question that an encoder reads: it has no media tokens that one could type."""

    def __init__(self, tokenizer: Any, escape: Escape) -> None:
        self._tokenizer = tokenizer
        self._escape = escape

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: list[str], **options: Any) -> Any:
        return self._tokenizer([self._escape.restore(one) for one in text], **options)


def with_flat_images(prepare: Any) -> Any:
    def prepare_flat(images: Any = None, *others: Any, **more: Any) -> Any:
        return prepare([one for nested in images or () for one in nested] or None, *others, **more)

    return prepare_flat


@cache
def called_by(call: CallProcessor, processor_class: Any) -> type:
    def called(self: Any, images: Any = None, text: Any = None, **options: Any) -> Any:
        given = {name: value for name, value in options.items() if value is not None}
        pictures = [one for nested in images or () for one in nested]
        return call(self, partial(processor_class.__call__, self), text, pictures, given)

    return type(processor_class.__name__, (processor_class,), {"__call__": called})


@cache
def plainly_called(processor_class: Any) -> type:
    return type(processor_class.__name__, (processor_class,), {"__call__": ProcessorMixin.__call__})
