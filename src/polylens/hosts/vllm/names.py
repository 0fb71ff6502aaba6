"""Names that carry an adapter's content, so that nothing vLLM keys by name ever meets another adapter's entries."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polylens.core import Digests

MARK = "@polylens-"
"""Between an adapter's name and its digest. A name given by a user may not hold it."""

DIGEST_CHARS = 32
"""Of the digest's 64: 128 bits."""

BASE_DIGEST = "0" * DIGEST_CHARS
"""Of an adapter that changes nothing."""


def stamped(name: str, digests: Digests) -> str:
    """`name` with the digest of the adapter's whole content."""
    return f"{name}{MARK}{digest_in_name(digests)}"


def digest_in_name(digests: Digests) -> str:
    return digests.whole[:DIGEST_CHARS] or BASE_DIGEST


def read_stamp(name: str) -> tuple[str, str | None]:
    """The user's name of an adapter and its digest (None if the name carries none)."""
    bare, mark, digest = name.rpartition(MARK)
    return (bare, digest) if mark else (name, None)


def content_id(name: str) -> int:
    """vLLM's number of an adapter, made of its stamped name: 61 bits, above the numbers that vLLM's server counts up.

    vLLM keeps one request's adapter apart from another's in the same step by this number alone.
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % (1 << 61) + (1 << 61)
