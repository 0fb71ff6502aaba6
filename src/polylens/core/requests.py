"""What is asked: a conversation or a text, with its media."""

from __future__ import annotations

from collections.abc import Mapping as MappingABC
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from polylens.core.checks import check
from polylens.core.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class MediaKind(StrEnum):
    IMAGE = "image"
    VIDEO = "video"


@dataclass(frozen=True, eq=False)
class MediaItem:
    """One image or video of a request, decoded.

    image: a PIL image in mode RGB, EXIF orientation applied. video: uint8 array (frames, height, width, 3).
    `key` is a hash of kind, mode, size, every byte and `fps` (hex, 256 bit): equal keys, equal content.
    `fps`: frames per second of the frames as given, or None if unknown.
    """

    kind: MediaKind
    data: Any
    key: str
    fps: float | None = None


@dataclass(frozen=True)
class ChatRequest:
    """One conversation to answer.

    messages: OpenAI-style dicts; content is a string or a list of parts `{"type": "text", "text"}`,
    `{"type": "image", "image": PIL image | path}`, `{"type": "video", "video": path | list of PIL
    images | uint8 array, "fps": optional}`. adapter: a loaded adapter's name, or None for the base.
    chat_template_kwargs: variables of the model's chat template. mm_processor_kwargs: `min_pixels`, `max_pixels`,
    `fps`, `num_frames` (see `models.media_settings`). cache_salt: what the request computes is found again in
    prefix and vision cache only by requests with the same salt.
    """

    messages: Sequence[Mapping[str, Any]]
    adapter: str | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        _check_request(self)


@dataclass(frozen=True)
class TextRequest:
    """A prompt to go on from, without chat template and media: text (typed control tokens bind nothing) or token ids.

    The rest as in `ChatRequest`.
    """

    prompt: str | Sequence[int]
    adapter: str | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        _check_request(self)


Request = ChatRequest | TextRequest


def _check_request(request: Request) -> None:
    """Raise RequestError for a field of another kind; messages and prompt are checked when they are read."""
    for name in ("adapter", "request_id", "cache_salt"):
        value = getattr(request, name)
        check(value is None or (isinstance(value, str) and bool(value)), name, value, "a non-empty string, or None")
    check(isinstance(request.sampling, SamplingParams), "sampling", request.sampling, "a SamplingParams")
    for name in ("chat_template_kwargs", "mm_processor_kwargs"):
        value = getattr(request, name, None)
        check(value is None or isinstance(value, MappingABC), name, value, "a dict, or None")
