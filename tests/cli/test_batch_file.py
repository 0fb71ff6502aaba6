"""Lines of the batch format: read one by one, so that a bad one spoils no other; written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from polylens.cli.batch_file import error_line, read_lines, result_line, write_whole
from polylens.core import Completion, FinishReason, Usage
from polylens.errors import MediaError, RequestError, UnknownAdapterError


def line(custom_id: Any = "a", content: Any = "hi", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "body": {"model": "m", "messages": [{"role": "user", "content": content}], **body}}


def read(tmp_path: Path, *lines: Any):
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), encoding="utf-8")
    return read_lines(file, {"m"}, ("base",))


def picture(url: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}}]


def test_good_and_bad_lines_stand_side_by_side(tmp_path: Path):
    full = {"method": "POST", "url": "/v1/chat/completions", **line("b", model="base")}
    lines = read(tmp_path, line("a"), "{broken", "", full, line("c", n=2))
    assert [entry.custom_id for entry in lines] == ["a", None, "b", "c"]
    assert [entry.error is None for entry in lines] == [True, False, True, False]
    assert lines[0].request is not None
    assert lines[0].request.adapter == "m"
    assert lines[2].request is not None
    assert lines[2].request.adapter is None
    assert "line 2 is not JSON" in str(lines[1].error)
    assert "'n'" in str(lines[3].error)


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
        (line(model="nobody"), "unknown adapter 'nobody'"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(tmp_path: Path, wrong: Any, message: str):
    lines = read(tmp_path, line("first"), wrong)
    assert lines[0].error is None
    assert message in str(lines[1].error)


def test_paths_are_relative_to_the_input_file_and_urls_stay(tmp_path: Path):
    urls = ["data:image/png;base64,AAAA", "sub/a.png", "/abs/a.png", "file:///abs/a%20b.png", "https://x.org/a.png"]
    urls.append("DATA:image/png;base64,AAAA")
    lines = read(tmp_path, *(line(str(i), content=picture(url)) for i, url in enumerate(urls)))
    found = [entry.request.messages[0]["content"][0]["image"] for entry in lines if entry.request]
    assert found == [urls[0], str(tmp_path / "sub/a.png"), *urls[2:]]


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_an_error(tmp_path: Path, content: str):
    with pytest.raises(RequestError, match="no requests"):
        read(tmp_path, content)


def test_a_file_that_is_no_text_is_an_error(tmp_path: Path):
    (tmp_path / "in.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match="not UTF-8"):
        read_lines(tmp_path / "in.jsonl", set(), ())


def test_answers_and_errors_have_openai_s_shape(tmp_path: Path):
    entry = read(tmp_path, line("a"))[0]
    answer = Completion("four", (1,), FinishReason.LENGTH, Usage(3, 1))
    good = json.loads(result_line(entry, answer, decode=str))
    assert good.keys() == {"id", "custom_id", "response", "error"}
    assert (good["custom_id"], good["error"], good["response"]["status_code"]) == ("a", None, 200)
    assert good["response"]["body"]["choices"][0]["message"]["content"] == "four"
    bad = json.loads(error_line(entry, MediaError("picture x is empty", "image_url")))
    assert bad["error"] == {"code": "invalid_request", "message": "picture x is empty", "param": "image_url"}
    assert bad["response"]["status_code"] == 400
    assert bad["response"]["body"] == {"error": bad["error"]}
    unknown = json.loads(error_line(entry, UnknownAdapterError("x", ("m",))))
    assert (unknown["response"]["status_code"], unknown["error"]["code"]) == (404, "unknown_model")


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
    [entry] = read(tmp_path, line("a\ud800é\\", n=2))
    assert entry.error is not None
    file = tmp_path / "out.jsonl"
    write_whole(file, error_line(entry, entry.error))
    assert json.loads(file.read_text(encoding="utf-8"))["custom_id"] == "a\ud800é\\"
