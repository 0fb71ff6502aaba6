"""Where the bytes of a request's media come from, and the border to the decoders.

Nothing is fetched from a network; only regular files are opened; whatever a decoder raises becomes one MediaError.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from polylens.config import MAX_IMAGE_PIXELS
from polylens.errors import MediaError, PolylensError, first_line


@contextmanager
def media_file(source: Any, name: str) -> Iterator[BinaryIO]:
    """The source as an open binary file. Fetches nothing: http(s) addresses are refused."""
    if isinstance(source, bytes | bytearray):
        yield _in_memory(bytes(source), name)
    elif isinstance(source, str) and source[:5].lower() == "data:":
        yield _in_memory(_data_url_bytes(source, name), name)
    elif isinstance(source, str | Path):
        with _open_path(_path_of(source, name), name) as file:
            yield file
    else:
        raise MediaError(f"{name}: cannot read media from a {type(source).__name__}; give a path or decoded pixels")


def _in_memory(content: bytes, name: str) -> BinaryIO:
    if not content:
        raise MediaError(f"{name} is empty (0 bytes)")
    return io.BytesIO(content)


def _data_url_bytes(url: str, name: str) -> bytes:
    header, comma, payload = url.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise MediaError(f"{name} must have the form data:TYPE;base64,DATA")
    try:
        return base64.b64decode(unquote(payload), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"{name} does not hold valid base64: {error}") from error


def _path_of(source: str | Path, name: str) -> Path:
    if isinstance(source, Path):
        return source
    try:
        if "://" not in source:
            return Path(source).expanduser()
        url = urlsplit(source)
    except (RuntimeError, ValueError) as error:  # "~nobody/…" without such a user; "http://[…": no address
        raise MediaError(f"{name} cannot be opened: {first_line(error)}") from error
    if url.scheme.lower() != "file":
        raise MediaError(f"{name}: addresses are not fetched; download the file and give its path or a data: URL")
    return Path(unquote(url.path))


def _open_path(path: Path, name: str) -> BinaryIO:
    try:
        if not path.exists():
            raise MediaError(f"{name} does not exist")
        if not path.is_file():  # a folder, a pipe or a device such as /dev/zero, which never ends
            raise MediaError(f"{name} is not a regular file")
        if path.stat().st_size == 0:
            raise MediaError(f"{name} is empty (0 bytes)")
        return path.open("rb")
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise MediaError(f"{name} cannot be opened: {getattr(error, 'strerror', None) or error}") from error


def describe(source: Any, kind: str) -> str:
    """What error messages call the source: short, and without the content of a data URL."""
    if isinstance(source, str) and source[:5].lower() == "data:":
        return f"{kind} given as a data: URL"
    if isinstance(source, str | Path):
        text = str(source)
        return f"{kind} {text if len(text) <= 200 else text[:200] + '…'!r}"
    return f"{kind} given as {type(source).__name__}"


@contextmanager
def decoding(name: str) -> Iterator[None]:
    """The border to the decoders: whatever they raise on broken files becomes one MediaError."""
    try:
        yield
    except PolylensError:
        raise
    except Exception as error:
        raise MediaError(f"{name} cannot be decoded: {first_line(error)}") from error


def check_size(width: int, height: int, name: str) -> None:
    if width < 1 or height < 1:
        raise MediaError(f"{name} has no pixels ({width} x {height})")
    if width * height > MAX_IMAGE_PIXELS:
        raise MediaError(
            f"{name} is too large: {width} x {height} pixels, the limit is {MAX_IMAGE_PIXELS} in all; scale it down"
        )
