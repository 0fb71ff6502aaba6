"""The lines of `polylens batch`: OpenAI's batch format, read and written."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polylens.cli.chat_body import chat_request, completion_body
from polylens.cli.options import read_text_file
from polylens.errors import PolylensError, RequestError, UnknownAdapterError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from polylens.core import ChatRequest, Completion

CHAT_URL = "/v1/chat/completions"

_IS_URL = re.compile(r"[dD][aA][tT][aA]:|[a-zA-Z][a-zA-Z0-9+.-]*://")


@dataclass(frozen=True)
class BatchLine:
    """One line of the input: either a request, or the error that says why it is none."""

    custom_id: str | None
    model: str
    request: ChatRequest | None = None
    error: PolylensError | None = None


def read_lines(path: Path, adapters: Collection[str], base_names: Collection[str]) -> list[BatchLine]:
    """Read every line that is not blank. Raises RequestError where the file cannot be read or has no line."""
    text = read_text_file(path, "input file")
    seen: set[str] = set()
    lines = [
        _read_line(raw, number, seen, path.absolute().parent, adapters, base_names)
        for number, raw in enumerate(text.split("\n"), 1)
        if raw.strip()
    ]
    if not lines:
        raise RequestError(f"input file {path} has no requests")
    return lines


def _read_line(
    raw: str, number: int, seen: set[str], folder: Path, adapters: Collection[str], base_names: Collection[str]
) -> BatchLine:
    custom_id, model = None, ""
    try:
        line = _parsed(raw, number)
        custom_id = _custom_id(line, number, seen)
        body = _body(line)
        model = str(body.get("model", ""))
        request = chat_request(body, adapters, base_names, lambda _kind, url: _media(url, folder))
    except PolylensError as error:  # becomes the error object of this line; the other lines go on
        return BatchLine(custom_id, model, error=error)
    return BatchLine(custom_id, model, request=request)


def _parsed(raw: str, number: int) -> dict[str, Any]:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"line {number} is not JSON: {error}") from error
    if not isinstance(line, dict):
        raise RequestError(f"line {number} is not a JSON object")
    return line


def _custom_id(line: dict[str, Any], number: int, seen: set[str]) -> str:
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise RequestError(f"line {number}: 'custom_id' must be a text", "custom_id")
    if custom_id in seen:
        raise RequestError(f"line {number}: the custom_id {custom_id!r} is used by an earlier line", "custom_id")
    seen.add(custom_id)
    return custom_id


def _body(line: dict[str, Any]) -> dict[str, Any]:
    if line.get("method", "POST") != "POST":
        raise RequestError(f"'method' must be POST, not {line['method']!r:.80}", "method")
    if line.get("url", CHAT_URL) != CHAT_URL:
        raise RequestError(f"'url' must be {CHAT_URL}, not {line['url']!r:.80}", "url")
    body = line.get("body")
    if not isinstance(body, dict):
        raise RequestError("'body' must be an object", "body")
    return body


def _media(url: str, folder: Path) -> str:
    """A data or file URL as it is; a path is relative to `folder`. What can be read is for the media reader to say."""
    return url if _IS_URL.match(url) else str(folder / url)


def result_line(line: BatchLine, completion: Completion, decode: Callable[[int], str]) -> str:
    """The output line of an answered request, with its newline."""
    body = completion_body(
        completion,
        completion_id=f"chatcmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=line.model,
        decode=decode,
    )
    return _line(line, 200, body, None)


def error_line(line: BatchLine, error: PolylensError) -> str:
    """The output line of a request that was not served, with its newline."""
    param = "model" if isinstance(error, UnknownAdapterError) else getattr(error, "param", None)
    code = "unknown_model" if isinstance(error, UnknownAdapterError) else "invalid_request"
    problem = {"code": code, "message": str(error), "param": param}
    status = 404 if isinstance(error, UnknownAdapterError) else 400
    return _line(line, status, {"error": problem}, problem)


def _line(line: BatchLine, status: int, body: dict[str, Any], error: dict[str, Any] | None) -> str:
    response = {"status_code": status, "request_id": f"req-{uuid.uuid4().hex}", "body": body}
    record = {"id": f"batch_req-{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": error}
    return json.dumps(record, ensure_ascii=False) + "\n"


def write_whole(path: Path, text: str) -> None:
    """Write lines of JSON so that the file is there in full or not at all: a crash leaves no half line.

    A lone surrogate, which JSON may escape (in a custom_id, say) and UTF-8 cannot hold, is escaped again.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp's files are private; an output file is an ordinary one
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
