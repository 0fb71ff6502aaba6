"""Messages: every accepted spelling gives one form; everything else is refused by name."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from polylens.config import NUM_SAMPLED_FRAMES
from polylens.core import MediaKind
from polylens.errors import MediaError, RequestError
from polylens.models.media import image_item, load_video
from polylens.models.prompt import MAX_NESTING, ParsedChat, parse_messages, plain_data, strings_in
from tests.families.media import picture, video


def parse(*parts: Any, takes_videos: bool = True, allow_paths: bool = True) -> ParsedChat:
    messages = [{"role": "user", "content": list(parts)}]
    return parse_messages(messages, takes_videos=takes_videos, allow_paths=allow_paths)


def png_url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


class TestForms:
    def test_every_spelling_of_a_picture(self, tmp_path: Path) -> None:
        image = picture(16, 12)
        path = tmp_path / "a.png"
        image.save(path)
        parts = [
            {"type": "image", "image": image},
            {"type": "image", "image": image_item(image)},
            {"type": "image", "image": str(path)},
            {"type": "image", "path": path},
            {"type": "image", "url": path.as_uri()},
            {"type": "image", "url": png_url(image)},
            {"type": "image_url", "image_url": {"url": png_url(image)}},
            {"type": "image_url", "image_url": {"url": str(path), "detail": "auto"}},
            {"type": "image_url", "image_url": png_url(image)},
        ]
        chat = parse(*parts)
        assert {item.key for item in chat.media} == {image_item(image).key}
        assert len(chat.media) == len(parts)
        assert all(part["type"] == "image" for part in chat.messages[0]["content"])

    def test_every_spelling_of_a_video(self) -> None:
        frames = video(4, 16, 12)
        listed = [Image.fromarray(frame) for frame in frames]
        chat = parse(
            {"type": "video", "video": frames, "fps": 2},
            {"type": "video", "video": listed, "fps": 2},
            {"type": "video", "video": load_video(frames, 2)},
        )
        assert {item.key for item in chat.media} == {load_video(frames, 2).key}
        assert [part["type"] for part in chat.messages[0]["content"]] == ["video"] * 3

    def test_video_url(self, tmp_path: Path) -> None:
        path = tmp_path / "v.gif"
        frames = [picture(8, 8, seed) for seed in range(4)]
        frames[0].save(path, save_all=True, append_images=frames[1:])
        chat = parse({"type": "video_url", "video_url": {"url": str(path)}}, {"type": "video", "path": path})
        assert chat.media[0].key == chat.media[1].key

    def test_media_are_in_the_order_of_the_messages(self) -> None:
        images = [picture(8, 8, seed) for seed in range(3)]
        frames = video(4, 8, 8)
        messages = [
            {
                "role": "user",
                "content": [{"type": "image", "image": images[0]}, {"type": "video", "video": frames}],
            },
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": [{"type": "image", "image": image} for image in images[1:]]},
        ]
        chat = parse_messages(messages, takes_videos=True)
        shown = [item.key for item in chat.media if item.kind is MediaKind.IMAGE]
        assert shown == [image_item(image).key for image in images]
        assert [item.kind for item in chat.media] == ["image", "video", "image", "image"]

    def test_video_becomes_pictures_where_the_model_takes_none(self) -> None:
        frames = video(20, 8, 8)
        chat = parse({"type": "video", "video": frames}, takes_videos=False)
        assert len(chat.media) == NUM_SAMPLED_FRAMES
        assert all(item.kind is MediaKind.IMAGE for item in chat.media)
        assert np.array_equal(np.asarray(chat.media[-1].data), frames[-1])
        assert [part["type"] for part in chat.messages[0]["content"]] == ["image"] * NUM_SAMPLED_FRAMES

    def test_messages_given_are_not_changed(self) -> None:
        image = picture(8, 8)
        messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": png_url(image)}}]}]
        before = repr(messages)
        parse_messages(messages, takes_videos=True)
        assert repr(messages) == before

    def test_tool_calls_and_missing_content(self) -> None:
        call = {"type": "function", "function": {"name": "f", "arguments": {"a": [1, None, True]}}}
        messages = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "ok", "tool_call_id": "1", "name": None},
        ]
        chat = parse_messages(messages, takes_videos=True)
        assert chat.messages[0] == {"role": "assistant", "tool_calls": [call]}
        assert chat.messages[1] == {"role": "tool", "content": "ok", "tool_call_id": "1"}


class TestRefused:
    @pytest.mark.parametrize("messages", [[], None, "hello", {"role": "user", "content": "x"}, b"x", 3])
    def test_not_a_list_of_messages(self, messages: Any) -> None:
        with pytest.raises(RequestError, match="non-empty list") as caught:
            parse_messages(messages, takes_videos=True)
        assert caught.value.param == "messages"

    @pytest.mark.parametrize(
        ("message", "param", "words"),
        [
            ("hello", "messages[0]", "role and content"),
            ({"role": "robot", "content": "x"}, "messages[0].role", "'robot'"),
            ({"content": "x"}, "messages[0].role", "None"),
            ({"role": ["user"], "content": "x"}, "messages[0].role", "one of system"),
            ({"role": "user", "content": "x", "colour": 1}, "messages[0]", "unknown field 'colour'"),
            ({"role": "user"}, "messages[0].content", "string or a list"),
            ({"role": "user", "content": 3}, "messages[0].content", "string or a list"),
            ({"role": "user", "content": "\ud800"}, "messages[0].content", "lone surrogate"),
            ({"role": "user", "content": "x", "name": {1, 2}}, "messages[0].name", "JSON data"),
        ],
    )
    def test_bad_message(self, message: Any, param: str, words: str) -> None:
        with pytest.raises(RequestError) as caught:
            parse_messages([message], takes_videos=True)
        assert caught.value.param == param
        assert words in str(caught.value)

    @pytest.mark.parametrize(
        ("part", "param", "words"),
        [
            ("text", "", "object with a type"),
            ({"text": "x"}, ".type", "got None"),
            ({"type": "input_audio"}, ".type", "'input_audio'"),
            ({"type": ["text"]}, ".type", "one of text"),
            ({"type": "text"}, ".text", "must be a string"),
            ({"type": "text", "text": 3}, ".text", "got int"),
            ({"type": "text", "text": "x", "image": "y"}, "", "unknown field 'image'"),
            ({"type": "image"}, "", "exactly one of image, path, url, got 0"),
            ({"type": "image", "image": "a", "url": "b"}, "", "got 2"),
            ({"type": "image_url"}, ".image_url", "string url"),
            ({"type": "image_url", "image_url": {"url": None}}, ".image_url", "string url"),
            ({"type": "image_url", "image_url": {"url": "x", "size": 1}}, ".image_url", "unknown field 'size'"),
            ({"type": "image_url", "image_url": {"url": "x", "detail": "low"}}, ".image_url.detail", "only 'auto'"),
            ({"type": "video", "video": "x", "start": 1}, "", "unknown field 'start'"),
        ],
    )
    def test_bad_part(self, part: Any, param: str, words: str) -> None:
        with pytest.raises(RequestError) as caught:
            parse({"type": "text", "text": "ok"}, part)
        assert caught.value.param == "messages[0].content[1]" + param
        assert words in str(caught.value)

    def test_media_errors_name_the_place(self, tmp_path: Path) -> None:
        with pytest.raises(MediaError, match=r"messages\[0\]\.content\[1\]: .*does not exist") as caught:
            parse({"type": "text", "text": "ok"}, {"type": "image", "image": str(tmp_path / "a.png")})
        assert caught.value.param == "messages[0].content[1]"

    @pytest.mark.parametrize("source", ["/etc/hostname", Path("/etc/hostname"), "file:///etc/hostname"])
    def test_local_files_where_they_are_not_allowed(self, source: Any) -> None:
        for part in ({"type": "image", "image": source}, {"type": "video", "video": [picture(8, 8), source]}):
            with pytest.raises(MediaError, match="only data: URLs"):
                parse(part, allow_paths=False)

    def test_data_urls_where_files_are_not_allowed(self) -> None:
        assert len(parse({"type": "image", "url": png_url(picture(8, 8))}, allow_paths=False).media) == 1

    def test_deep_nesting(self) -> None:
        value: Any = "x"
        for _ in range(MAX_NESTING + 2):
            value = [value]
        with pytest.raises(RequestError, match="nested more than"):
            plain_data(value, "tools")


def test_strings_in_finds_keys_and_values() -> None:
    assert strings_in({"a": ["b", {"c": 1}], "d": ("e", None)}) == ["a", "b", "c", "d", "e"]
