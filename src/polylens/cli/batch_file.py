"""The lines of `polylens batch`: OpenAI's batch format, read and written."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polylens.cli.options import read_text_file
from polylens.errors import PolylensError, RequestError
from polylens.server.error_objects import error_object, status_of
from polylens.server.media import MediaSource
from polylens.server.options import MediaPolicy
from polylens.server.parse import parse_body
from polylens.server.schema import ChatBody, CompletionBody

if TYPE_CHECKING:
    from polylens.server.intake import GenerationBody

CHAT_URL = "/v1/chat/completions"
BODIES: dict[str, type[ChatBody] | type[CompletionBody]] = {CHAT_URL: ChatBody, "/v1/completions": CompletionBody}
"""What `url` may say -> the body that goes with it."""

_IS_URL = re.compile(r"data:|[a-z][a-z0-9+.-]*://", re.IGNORECASE)


@dataclass(frozen=True)
class BatchLine:
    """One line of the input, as it is written: with a body, or with the error that says why it has none."""

    raw: str
    custom_id: str | None
    body: GenerationBody | None = None
    error: PolylensError | None = None


def read_lines(path: Path) -> list[BatchLine]:
    """Read every line that is not blank. Raises RequestError where the file cannot be read or has no line."""
    text = read_text_file(path, "input file")
    seen: set[str] = set()
    lines = [_read_line(raw, number, seen) for number, raw in enumerate(text.split("\n"), 1) if raw.strip()]
    if not lines:
        raise RequestError(f"input file {path} has no requests")
    return lines


def _read_line(raw: str, number: int, seen: set[str]) -> BatchLine:
    custom_id = None
    try:
        line = _parsed(raw, number)
        custom_id = _custom_id(line, number, seen)
        return BatchLine(raw, custom_id, body=_body(line))
    except PolylensError as error:  # becomes the error object of this line; the other lines go on
        return BatchLine(raw, custom_id, error=error)


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


def _body(line: dict[str, Any]) -> GenerationBody:
    if line.get("method", "POST") != "POST":
        raise RequestError(f"'method' must be POST, not {line['method']!r:.80}", "method")
    url = line.get("url", CHAT_URL)
    kind = BODIES.get(url) if isinstance(url, str) else None
    if kind is None:
        raise RequestError(f"'url' must be {' or '.join(BODIES)}, not {url!r:.80}", "url")
    if not isinstance(line.get("body"), dict):
        raise RequestError("'body' must be an object", "body")
    body: GenerationBody = parse_body(kind, json.dumps(line["body"]).encode())
    if body.stream:
        raise RequestError("'stream' has no meaning in a batch file; remove it", "stream")
    return body


class FileMedia(MediaSource):
    """Media of an input file: data URLs, file URLs, and paths relative to the file. Nothing is fetched."""

    def __init__(self, folder: Path) -> None:
        super().__init__(MediaPolicy(max_images=sys.maxsize, max_videos=sys.maxsize))  # it is the user's own machine
        self._folder = folder

    async def content(self, url: str) -> str | bytes:
        """An address or path that the media reader opens. Raises MediaError for one that would be fetched."""
        if url.lower().startswith("file:"):
            return url
        return await super().content(url) if _IS_URL.match(url) else str(self._folder / url)


def result_line(line: BatchLine, body: dict[str, Any]) -> str:
    """The output line of an answered request, with its newline. body: as the server would answer."""
    return _line(line, 200, body, None)


def error_line(line: BatchLine, error: PolylensError) -> str:
    """The output line of a request that was not served, with its newline."""
    body = error_object(error)
    return _line(line, status_of(error), body, body["error"])


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
