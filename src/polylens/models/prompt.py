"""Check the messages of a request and take the media out of them.

What comes out has one fixed form, whatever spelling came in: parts are `{"type": "text", "text"}`,
`{"type": "image", "image": pixels}` and `{"type": "video", "video": pixels}`, as transformers' chat templates
and processors take them. Nothing is ignored: a field, part or role that is not known is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polylens.config import NUM_SAMPLED_FRAMES
from polylens.core import MediaItem
from polylens.errors import MediaError, RequestError
from polylens.models.media import image_item, load_image, load_video, sample_frames
from polylens.models.media_settings import MediaSettings

ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")
"""Fields a message may have; all but `role` and `content` are for the chat template to use."""

MAX_NESTING = 32
"""Deepest nesting of tool calls and template variables: far above any real one, far below Python's own limit."""

_SOURCE_FIELDS = {"image": ("image", "path", "url"), "video": ("video", "path", "url")}


@dataclass
class ParsedChat:
    """Messages in one fixed form, and their media in the order of the messages."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    media: list[MediaItem] = field(default_factory=list)


MODEL_SETTINGS = MediaSettings()
"""A request that asks nothing of the processing of its media."""


def parse_messages(
    messages: Any,
    *,
    takes_videos: bool,
    allow_paths: bool = True,
    settings: MediaSettings = MODEL_SETTINGS,
    num_frames: int | None = None,
) -> ParsedChat:
    """Check `messages` and decode their media.

    takes_videos: whether the model's processor takes videos; if not, a video becomes NUM_SAMPLED_FRAMES evenly
    spaced frames as pictures in its place. allow_paths: whether media may name local files; a server that
    answers strangers must not read its own disk for them. settings: which frames of video files are taken.
    num_frames: of every video, where the model takes no other number.
    Raises RequestError (its `param` names the place) and MediaError.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a non-empty list of messages", param="messages")
    parser = _Parser(takes_videos, allow_paths, settings, num_frames)
    for index, message in enumerate(messages):
        parser.add_message(message, f"messages[{index}]")
    return parser.chat


class _Parser:
    def __init__(
        self, takes_videos: bool, allow_paths: bool, settings: MediaSettings, num_frames: int | None = None
    ) -> None:
        self.chat = ParsedChat()
        self._takes_videos = takes_videos
        self._allow_paths = allow_paths
        self._settings = settings
        self._num_frames = num_frames
        self._part_parsers: Mapping[str, Callable[[Mapping[str, Any], str], list[dict[str, Any]]]] = {
            "text": self._text,
            "image": self._image,
            "image_url": self._image_url,
            "video": self._video,
            "video_url": self._video_url,
        }

    def add_message(self, message: Any, where: str) -> None:
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} must be an object with role and content", param=where)
        _only_fields(message, MESSAGE_FIELDS, where)
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}", param=f"{where}.role")
        parsed = {name: plain_data(value, f"{where}.{name}") for name, value in message.items() if name != "content"}
        content = self._content(message, f"{where}.content")
        if content is not None:
            parsed["content"] = content
        self.chat.messages.append({name: value for name, value in parsed.items() if value is not None})

    def _content(self, message: Mapping[str, Any], where: str) -> str | list[dict[str, Any]] | None:
        content = message.get("content")
        if isinstance(content, str):
            return _text(content, where)
        if content is None and message.get("tool_calls"):
            return None
        if isinstance(content, bytes) or not isinstance(content, Sequence):
            raise RequestError(f"{where} must be a string or a list of parts", param=where)
        return [piece for index, part in enumerate(content) for piece in self._part(part, f"{where}[{index}]")]

    def _part(self, part: Any, where: str) -> list[dict[str, Any]]:
        if not isinstance(part, Mapping):
            raise RequestError(f"{where} must be an object with a type", param=where)
        kind = part.get("type")
        parse = self._part_parsers.get(kind) if isinstance(kind, str) else None
        if parse is None:
            known = ", ".join(self._part_parsers)
            raise RequestError(f"{where}.type must be one of {known}, got {kind!r}", param=f"{where}.type")
        try:
            return parse(part, where)
        except MediaError as error:
            raise MediaError(f"{where}: {error}", param=where) from error

    def _text(self, part: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        _only_fields(part, ("type", "text"), where)
        return [{"type": "text", "text": _text(part.get("text"), f"{where}.text")}]

    def _image(self, part: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        _only_fields(part, ("type", *_SOURCE_FIELDS["image"]), where)
        return self._add_image(_source(part, "image", where))

    def _image_url(self, part: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        _only_fields(part, ("type", "image_url"), where)
        detail = part["image_url"].get("detail") if isinstance(part.get("image_url"), Mapping) else None
        if detail not in (None, "auto"):
            raise RequestError(
                f"{where}.image_url.detail: only 'auto' is supported, got {detail!r}; resize the picture instead",
                param=f"{where}.image_url.detail",
            )
        return self._add_image(_url(part, "image_url", ("url", "detail"), where))

    def _video(self, part: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        _only_fields(part, ("type", "fps", *_SOURCE_FIELDS["video"]), where)
        return self._add_video(_source(part, "video", where), part.get("fps"))

    def _video_url(self, part: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        _only_fields(part, ("type", "fps", "video_url"), where)
        return self._add_video(_url(part, "video_url", ("url",), where), part.get("fps"))

    def _add_image(self, source: Any) -> list[dict[str, Any]]:
        self._check_path(source)
        return [self._image_part(load_image(source))]

    def _add_video(self, source: Any, fps: Any) -> list[dict[str, Any]]:
        self._check_path(source)
        video = self._load_video(source, fps)
        if not self._takes_videos:
            wanted = self._settings.num_frames or NUM_SAMPLED_FRAMES
            return [self._image_part(image_item(frame)) for frame in sample_frames(video, wanted)]
        self.chat.media.append(video)
        return [{"type": "video", "video": video.data}]

    def _load_video(self, source: Any, fps: Any) -> MediaItem:
        if self._num_frames is not None:
            return self._video_of(self._num_frames, source, fps)
        if not self._settings.changes_frames:
            return load_video(source, fps)
        if not isinstance(source, str | bytes | bytearray | Path):
            raise MediaError("mm_processor_kwargs fps and num_frames choose frames of video files, not of given frames")
        if fps is not None and self._settings.num_frames is not None:
            raise MediaError("a video part's fps and num_frames in mm_processor_kwargs exclude each other")
        return load_video(source, fps if fps is not None else self._settings.fps, self._settings.num_frames)

    def _video_of(self, num_frames: int, source: Any, fps: Any) -> MediaItem:
        if fps is not None or self._settings.changes_frames:
            raise MediaError(f"this model takes {num_frames} frames of any video; leave fps and num_frames out")
        video = load_video(source, num_frames=num_frames)
        if len(video.data) != num_frames:
            raise MediaError(f"this model takes {num_frames} frames of a video, got {len(video.data)}")
        return video

    def _image_part(self, item: MediaItem) -> dict[str, Any]:
        self.chat.media.append(item)
        return {"type": "image", "image": item.data}

    def _check_path(self, source: Any) -> None:
        if self._allow_paths:
            return
        if isinstance(source, list | tuple):
            for frame in source:
                self._check_path(frame)
        elif isinstance(source, Path) or (isinstance(source, str) and source[:5].lower() != "data:"):
            raise MediaError("only data: URLs are taken here; send the content as one")


def _only_fields(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in given:
        if name not in known:
            raise RequestError(f"{where} has an unknown field {name!r}; known: {', '.join(known)}", param=where)


def _source(part: Mapping[str, Any], kind: str, where: str) -> Any:
    """The one media source a part names."""
    names = [name for name in _SOURCE_FIELDS[kind] if part.get(name) is not None]
    if len(names) != 1:
        wanted = ", ".join(_SOURCE_FIELDS[kind])
        raise RequestError(f"{where} must have exactly one of {wanted}, got {len(names)}", param=where)
    return part[names[0]]


def _url(part: Mapping[str, Any], name: str, known: Sequence[str], where: str) -> str:
    """The address in OpenAI's form `{name: {"url": …}}`, or the short one `{name: …}`."""
    value = part.get(name)
    if isinstance(value, Mapping):
        _only_fields(value, known, f"{where}.{name}")
        value = value.get("url")
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be an object with a string url", param=f"{where}.{name}")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{where} must be a string, got {type(value).__name__}", param=where)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{where} is not valid Unicode (a lone surrogate at {error.start})", param=where) from error
    return value


def plain_data(value: Any, where: str, depth: int = 0) -> Any:
    """JSON data from a user, checked; lists and dicts copied. RequestError names what is not JSON."""
    if depth > MAX_NESTING:
        raise RequestError(f"{where} is nested more than {MAX_NESTING} deep", param=where)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, Mapping):
        return {_text(key, where): plain_data(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise RequestError(f"{where} must be JSON data, got {type(value).__name__}", param=where)


def strings_in(value: Any) -> list[str]:
    """Every string in nested dicts (keys too) and lists."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for part in pair for text in strings_in(part)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in strings_in(item)]
    return []
