"""Where the pictures and videos of a request come from: data URLs, files below one folder, addresses if allowed.

What comes out are parts the engine takes without opening any path: `{"type": "image", "image": data URL | bytes}`.
Decoding is the engine's workers' business.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from polylens.errors import MediaError, RequestError
from polylens.server.media_fetch import Fetcher
from polylens.server.schema import TextPart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polylens.server.options import MediaPolicy
    from polylens.server.schema import ImagePart, Message, VideoPart


class MediaSource:
    """Turns the messages of a body into those of the engine, within the policy."""

    def __init__(self, policy: MediaPolicy) -> None:
        self._policy = policy
        self._fetcher = Fetcher(policy)

    async def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages with their media in place. Raises RequestError, MediaError; each names the part at fault."""
        self._check_counts(messages)
        return [await self._message(message, f"messages[{index}]") for index, message in enumerate(messages)]

    def _check_counts(self, messages: Sequence[Message]) -> None:
        kinds = media_kinds(messages)
        for kind, limit in (("image", self._policy.max_images), ("video", self._policy.max_videos)):
            if kinds.count(kind) > limit:
                raise RequestError(
                    f"the request has {kinds.count(kind)} {kind}s; at most {limit} are taken", param="messages"
                )

    async def _message(self, message: Message, where: str) -> dict[str, Any]:
        plain = message.model_dump(exclude_none=True, exclude={"content"})
        if isinstance(message.content, list):
            parts = enumerate(message.content)
            plain["content"] = [await self._part(part, f"{where}.content[{index}]") for index, part in parts]
        elif message.content is not None:
            plain["content"] = message.content
        return plain

    async def _part(self, part: TextPart | ImagePart | VideoPart, where: str) -> dict[str, Any]:
        if isinstance(part, TextPart):
            return {"type": "text", "text": part.text}
        kind = part.type.removesuffix("_url")
        given = getattr(part, part.type)
        url = given if isinstance(given, str) else given.url
        try:
            return {"type": kind, kind: await self.content(url)}
        except MediaError as error:
            raise MediaError(f"{where}: {error}", param=where) from error

    async def content(self, url: str) -> str | bytes:
        """What the engine takes for an address: a data URL, or the file's bytes. Raises MediaError."""
        scheme = url.partition(":")[0].lower()
        if scheme == "data":
            return url
        if scheme in ("http", "https"):
            return await self._fetcher.fetch(url)
        if scheme == "file":
            return await asyncio.to_thread(self._file, url)
        raise MediaError("the address must be a data: URL, or an http, https or file address where these are allowed")

    def _file(self, url: str) -> bytes:
        root = self._policy.local_root
        if root is None:
            raise MediaError("file addresses are not allowed here; send the content as a data: URL")
        return read_below(root, unquote(urlsplit(url).path), self._policy.max_bytes)


def read_below(root: Path, name: str, max_bytes: int) -> bytes:
    """The content of a regular file below `root`, symlinks and ".." resolved first. Raises MediaError.

    What is not there and what lies elsewhere is answered alike: the server's disk is nobody's business.
    """
    denied = MediaError("no such file in the allowed folder")
    try:
        path = (root / name).resolve(strict=True)
        if not path.is_relative_to(root.resolve()) or not path.is_file():
            raise denied
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except (OSError, ValueError, RuntimeError) as error:  # missing, no access; a null byte; a loop of links
        raise denied from error
    if len(content) > max_bytes:
        raise MediaError(f"the file is larger than {max_bytes} bytes")
    return content


def media_kinds(messages: Sequence[Message]) -> list[str]:
    """ "image" or "video" for each part that is not text, in order."""
    return [
        part.type.removesuffix("_url")
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
        if not isinstance(part, TextPart)
    ]
