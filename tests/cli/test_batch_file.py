"""Lines of the batch format: read one by one, so that a bad one spoils no other; written whole or not at all."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from polylens.cli.batch_file import FileMedia, error_line, read_lines, result_line, write_whole
from polylens.errors import MediaError, RequestError, UnknownAdapterError
from polylens.server.schema import ChatBody, CompletionBody


def line(custom_id: Any = "a", content: Any = "hi", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "body": {"model": "m", "messages": [{"role": "user", "content": content}], **body}}


def read(tmp_path: Path, *lines: Any):
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), encoding="utf-8")
    return read_lines(file)


def picture(url: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}}]


def test_good_and_bad_lines_stand_side_by_side(tmp_path: Path):
    full = {"method": "POST", "url": "/v1/chat/completions", **line("b", model="base")}
    plain = {"custom_id": "d", "url": "/v1/completions", "body": {"model": "m", "prompt": ["a", "b"]}}
    lines = read(tmp_path, line("a"), "{broken", "", full, line("c", n=0), plain)
    assert [entry.custom_id for entry in lines] == ["a", None, "b", "c", "d"]
    assert [entry.error is None for entry in lines] == [True, False, True, False, True]
    assert isinstance(lines[0].body, ChatBody)
    assert isinstance(lines[4].body, CompletionBody)
    assert "line 2 is not JSON" in str(lines[1].error)
    assert str(lines[3].error).startswith("n: ")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("[]", "not a JSON object"),
        ("[" * 100_000, "not JSON"),
        ({"body": {}}, "'custom_id'"),
        (line(5), "'custom_id'"),
        (line("first"), "used by an earlier line"),
        ({"custom_id": "x"}, "'body' must be an object"),
        ({**line(), "method": "GET"}, "'method' must be POST"),
        ({**line(), "url": "/v1/embeddings"}, "'url' must be"),
        ({**line(), "url": ["/v1/completions"]}, "'url' must be"),
        (line(stream=True), "'stream' has no meaning"),
        (line(surprise=1), "'surprise' is not supported"),
        (line(temperature=float("nan")), "temperature"),
        (line(messages=[]), "messages"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(tmp_path: Path, wrong: Any, message: str):
    lines = read(tmp_path, line("first"), wrong)
    assert lines[0].error is None
    assert message in str(lines[1].error)


def test_paths_are_relative_to_the_input_file_and_nothing_is_fetched(tmp_path: Path):
    urls = ["data:image/png;base64,AAAA", "sub/a.png", "/abs/a.png", "file:///abs/a%20b.png", "DATA:,", "C.png"]
    media = FileMedia(tmp_path)
    found = [asyncio.run(media.content(url)) for url in urls]
    assert found == [urls[0], str(tmp_path / "sub/a.png"), *urls[2:5], str(tmp_path / "C.png")]
    for url in ("https://x.org/a.png", "HTTP://x.org/a.png", "ftp://x.org/a.png"):
        with pytest.raises(MediaError):
            asyncio.run(media.content(url))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_an_error(tmp_path: Path, content: str):
    with pytest.raises(RequestError, match="no requests"):
        read(tmp_path, content)


def test_a_file_that_is_no_text_is_an_error(tmp_path: Path):
    (tmp_path / "in.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match="not UTF-8"):
        read_lines(tmp_path / "in.jsonl")


def test_answers_and_errors_have_openai_s_shape(tmp_path: Path):
    entry = read(tmp_path, line("a"))[0]
    good = json.loads(result_line(entry, {"object": "chat.completion"}))
    assert good.keys() == {"id", "custom_id", "response", "error"}
    assert (good["custom_id"], good["error"], good["response"]["status_code"]) == ("a", None, 200)
    assert good["response"]["body"] == {"object": "chat.completion"}
    bad = json.loads(error_line(entry, MediaError("picture x is empty", "image_url")))
    assert bad["error"] == {
        "message": "picture x is empty", "type": "invalid_request_error", "param": "image_url", "code": None,
    }  # fmt: skip
    assert bad["response"]["status_code"] == 400
    assert bad["response"]["body"] == {"error": bad["error"]}
    unknown = json.loads(error_line(entry, UnknownAdapterError("x", ("m",))))
    assert (unknown["response"]["status_code"], unknown["error"]["code"]) == (404, "model_not_found")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "out.jsonl"
    write_whole(target, "old\n")

    def full_disk(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_whole(target, "new\n")
    assert target.read_text() == "old\n"
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_a_lone_surrogate_in_an_id_comes_back(tmp_path: Path):
    """JSON can escape half a character; UTF-8 cannot hold it, so it is written escaped."""
    [entry] = read(tmp_path, line("a\ud800é\\", n=0))
    assert entry.error is not None
    file = tmp_path / "out.jsonl"
    write_whole(file, error_line(entry, entry.error))
    assert json.loads(file.read_text(encoding="utf-8"))["custom_id"] == "a\ud800é\\"
