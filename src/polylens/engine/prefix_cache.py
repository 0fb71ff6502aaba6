"""KV pages kept after use, found again by the content of everything before and in them.

A page's key is a SHA-256 chain: (key of the page before it, token ids, media rows, bidirectional spans), and
the chain starts from the digest of the adapter's language deltas and the request's salt. Names play no part, so
an adapter replaced under its name never meets the old one's pages, and adapters without language deltas share
the base model's. Tokens of media are placeholders: what tells pictures apart is (vision key, feature row).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

from polylens.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from polylens.engine.pages import PageAllocator
    from polylens.engine.sequence import Sequence


class PrefixCache:
    """Full pages by content. The cache is one user of each page it keeps.

    Pages with no other user are *idle*: they stay until pages are short and go in order of last use. All
    pages of sequences are given back through `release`, which is how the cache sees pages become idle.
    `salt` separates caches that must not share (for example two base models). text_needs_connector: whether the
    connector takes part in text too, so that adapters which change it do not share the base model's pages.
    """

    def __init__(
        self, page_tokens: int, allocator: PageAllocator, salt: str = "", *, text_needs_connector: bool = False
    ) -> None:
        self._page_tokens = page_tokens
        self._allocator = allocator
        self._salt = salt
        self._text_needs_connector = text_needs_connector
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._language_of: dict[int, str] = {}
        """Language digest by page."""
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._page_of)

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could free now."""
        return len(self._idle)

    def lookup(self, seq: Sequence) -> list[int]:
        """The kept pages that hold the longest known prefix of `seq`; the caller becomes one more user of each.

        Never covers the last token (its logits are needed), and never ends inside a bidirectional span.
        """
        pages: list[int] = []
        for digest in self._digests(seq, (seq.num_tokens - 1) // self._page_tokens):
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        pages = pages[: self._outside_spans(seq, len(pages))]
        self._allocator.share(pages)
        for page in pages:
            self._idle.pop(page, None)
        return pages

    def insert(self, seq: Sequence) -> None:
        """Keep the pages of `seq` that are full and computed, unless equal ones are kept already."""
        num_full = seq.num_computed // self._page_tokens
        digests = self._digests(seq, num_full)
        for index in range(seq.num_offered_pages, num_full):
            page, digest = seq.page_table[index], digests[index]
            if digest not in self._page_of:
                self._allocator.share([page])
                self._page_of[digest] = page
                self._digest_of[page] = digest
                self._language_of[page] = _language(seq)
        seq.num_offered_pages = max(seq.num_offered_pages, num_full)

    def release(self, pages: Seq[int]) -> None:
        """Give back one use of each page of a sequence, in the order of its page table."""
        # Last page first: a page is of no use without those before it, so the end of a chain must go first.
        for page in reversed(pages):
            self._allocator.free([page])
            if page in self._digest_of and self._allocator.users(page) == 1:
                self._idle[page] = None

    def evict(self, count: int) -> None:
        """Free the `count` idle pages that were used longest ago."""
        if count > len(self._idle):
            raise InternalError(f"{count} cached pages to evict, {len(self._idle)} idle")
        for _ in range(count):
            self._drop(next(iter(self._idle)))

    def forget(self, language: str) -> None:
        """Free the idle pages made with these language deltas, which are gone."""
        for page in [page for page in self._idle if self._language_of[page] == language]:
            self._drop(page)

    def _drop(self, page: int) -> None:
        del self._idle[page]
        del self._page_of[self._digest_of.pop(page)]
        del self._language_of[page]
        self._allocator.free([page])

    def clear(self) -> None:
        """Free all idle pages."""
        self.evict(len(self._idle))

    def _digests(self, seq: Sequence, count: int) -> list[bytes]:
        """Keys of the first `count` pages of `seq` (all full); remembered in the sequence."""
        digests = seq.page_digests
        while len(digests) < count:
            digests.append(
                _page_digest(digests[-1] if digests else self._root(seq), seq, len(digests), self._page_tokens)
            )
        return digests[:count]

    def _root(self, seq: Sequence) -> bytes:
        connector = seq.adapter.vision_digest if self._text_needs_connector and seq.adapter is not None else ""
        parts = (self._salt, seq.cache_salt, _language(seq), connector)
        return hashlib.sha256(b"".join(map(_text, parts))).digest()

    def _outside_spans(self, seq: Sequence, num_pages: int) -> int:
        """The most pages, up to `num_pages`, that do not end inside a bidirectional span."""
        # The KV of a span's first tokens is right only with the span's last tokens, which the pages up to here do
        # not name.
        while span := seq.span_cut_by(num_pages * self._page_tokens):
            num_pages = span[0] // self._page_tokens
        return num_pages

    def kept_pages(self) -> set[int]:
        """All pages the cache uses."""
        return set(self._digest_of)

    def check_integrity(self) -> None:
        """Raise InternalError unless both maps agree and the idle pages are those without another user."""
        if {digest: page for page, digest in self._digest_of.items()} != self._page_of:
            raise InternalError("prefix cache: keys and pages do not match")
        idle = {page for page in self._digest_of if self._allocator.users(page) == 1}
        if idle != set(self._idle):
            raise InternalError(f"prefix cache: idle pages {sorted(self._idle)} should be {sorted(idle)}")
        if any(self._allocator.users(page) == 0 for page in self._digest_of):
            raise InternalError("prefix cache: a kept page is free")


def _language(seq: Sequence) -> str:
    return seq.adapter.language_digest if seq.adapter is not None else ""


def _page_digest(parent: bytes, seq: Sequence, index: int, page_tokens: int) -> bytes:
    """Key of page `index` of `seq`. Every part is preceded by its length, so no two contents read alike."""
    start, stop = index * page_tokens, (index + 1) * page_tokens
    digest = hashlib.sha256(parent)
    digest.update(_ints(seq.token_ids[start:stop]))
    for media in seq.media_in(start, stop):
        digest.update(_ints([media.start, media.length, media.offset_in_item]) + _text(media.vision_key))
    spans = [span for span in seq.bidirectional_spans if span[0] < stop and start < span[1]]
    digest.update(_ints([edge for span in spans for edge in span]))
    if seq.keeps_prompt and seq.num_prompt_tokens < stop:  # where the prompt ends decides what the others saw
        digest.update(_ints([seq.num_prompt_tokens]))
    return digest.digest()


def _ints(values: Seq[int]) -> bytes:
    return array("q", [len(values), *values]).tobytes()


def _text(value: str) -> bytes:
    data = value.encode()
    return _ints([len(data)]) + data
