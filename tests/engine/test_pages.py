from __future__ import annotations

import random
from collections import Counter

import pytest

from polylens.engine.pages import PageAllocator, pages_for
from polylens.errors import InternalError


def test_pages_for_rounds_up():
    assert [pages_for(count, 4) for count in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("seed", range(5))
def test_random_walk_agrees_with_plain_counts(seed):
    rng, allocator, users = random.Random(seed), PageAllocator(12), Counter()
    for _ in range(500):
        action = rng.choice(("allocate", "share", "free", "free"))
        held = [page for page in users if users[page]]
        some = rng.sample(held, rng.randint(0, len(held)))
        if action == "allocate":
            pages = allocator.allocate(rng.randint(0, allocator.num_free))
            assert len(set(pages)) == len(pages)
            assert not any(users[page] for page in pages)
            users.update(pages)
        elif action == "share":
            allocator.share(some)
            users.update(some)
        else:
            allocator.free(some)
            users.subtract(some)
        allocator.check_integrity()
        assert [allocator.users(page) for page in range(12)] == [users[page] for page in range(12)]
        assert allocator.num_free == sum(users[page] == 0 for page in range(12))


def test_misuse_is_an_internal_error():
    allocator = PageAllocator(2)
    (page,) = allocator.allocate(1)
    allocator.free([page])
    with pytest.raises(InternalError, match="freed twice"):
        allocator.free([page])
    with pytest.raises(InternalError, match="shared while free"):
        allocator.share([page])
    with pytest.raises(InternalError, match="3 pages asked for, 2 free"):
        allocator.allocate(3)
    allocator.check_integrity()


def test_check_integrity_sees_a_lost_page():
    allocator = PageAllocator(2)
    allocator._free.pop()
    with pytest.raises(InternalError, match="free list"):
        allocator.check_integrity()
