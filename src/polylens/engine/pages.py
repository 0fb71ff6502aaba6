"""Who owns which KV page. Page ids and counts only: the storage itself belongs to the runner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polylens.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterable


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_tokens)


class PageAllocator:
    """Hands out the page ids 0 … num_pages - 1, each with a count of its users.

    A page is free when its count is zero. Misuse (sharing or freeing a free page, allocating more than is
    free) raises InternalError: callers look at `num_free` first.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._users = [0] * num_pages
        # A stack: a page used lately is likely still in the processor's cache.
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def users(self, page: int) -> int:
        """How many hold the page."""
        return self._users[page]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, one user each."""
        if count > len(self._free):
            raise InternalError(f"{count} pages asked for, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one user to each page in use."""
        for page in pages:
            if self._users[page] == 0:
                raise InternalError(f"page {page} shared while free")
            self._users[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Take one user from each page; pages without users become free."""
        for page in pages:
            if self._users[page] == 0:
                raise InternalError(f"page {page} freed twice")
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free.append(page)

    def check_integrity(self) -> None:
        """Raise InternalError unless the free list is exactly the pages without users, each once."""
        unused = [page for page, users in enumerate(self._users) if users == 0]
        if sorted(self._free) != unused or min(self._users, default=0) < 0:
            raise InternalError(f"free list {sorted(self._free)} is not the unused pages {unused}")
