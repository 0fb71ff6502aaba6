"""The pages that sequences can have: free ones, and idle ones of the prefix cache, which go when they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polylens.engine.pages import pages_for
from polylens.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polylens.engine.pages import PageAllocator
    from polylens.engine.prefix_cache import PrefixCache
    from polylens.engine.sequence import Sequence


class PagePool:
    """Pages of `page_tokens` tokens. prefix_cache: None where no page is ever shared."""

    def __init__(self, page_tokens: int, allocator: PageAllocator, prefix_cache: PrefixCache | None) -> None:
        self.page_tokens = page_tokens
        self._allocator = allocator
        self._prefix_cache = prefix_cache

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def num_available(self) -> int:
        """Pages that can be had without preempting anyone."""
        return self._allocator.num_free + (self._prefix_cache.num_evictable if self._prefix_cache is not None else 0)

    def for_tokens(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return pages_for(num_tokens, self.page_tokens)

    def take(self, count: int) -> list[int]:
        """`count` pages of the available ones."""
        short = count - self._allocator.num_free
        if short > 0 and self._prefix_cache is not None:
            self._prefix_cache.evict(short)
        return self._allocator.allocate(count)

    def release(self, pages: list[int]) -> None:
        """One user less of each of the pages."""
        if self._prefix_cache is not None:
            self._prefix_cache.release(pages)
        else:
            self._allocator.free(pages)

    def known(self, seq: Sequence) -> list[int]:
        """Pages that hold the first tokens of `seq` already, one more user on each."""
        return self._prefix_cache.lookup(seq) if self._prefix_cache is not None else []

    def remember(self, seq: Sequence) -> None:
        """Pages of `seq` that are full now can be others' from here on."""
        if self._prefix_cache is not None:
            self._prefix_cache.insert(seq)

    def check_integrity(self, in_use: Iterable[int]) -> None:
        """Raise InternalError unless every page has the users that `in_use` and the prefix cache give it."""
        self._allocator.check_integrity()
        kept: Iterable[int] = ()
        if self._prefix_cache is not None:
            self._prefix_cache.check_integrity()
            kept = self._prefix_cache.kept_pages()
        users = [0] * self.num_pages
        for page in [*kept, *in_use]:
            users[page] += 1
        for page, count in enumerate(users):
            if count != self._allocator.users(page):
                raise InternalError(f"page {page}: {count} users, {self._allocator.users(page)} counted")
