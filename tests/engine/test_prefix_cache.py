from __future__ import annotations

import random

import pytest

from polylens.engine.pages import PageAllocator
from polylens.engine.prefix_cache import PrefixCache
from polylens.engine.sequence import MediaSpan
from polylens.errors import InternalError
from tests.engine.simulation import MEDIA_TOKEN, contents, make_adapter, make_sequence, random_sequence

PAGE = 4


def make_cache(num_pages=32, **options):
    allocator = PageAllocator(num_pages)
    return allocator, PrefixCache(PAGE, allocator, **options)


def compute(allocator, cache, seq):
    """Compute all of `seq` in new pages and offer them."""
    seq.page_table = allocator.allocate(-(-seq.num_tokens // PAGE))
    seq.num_computed = seq.num_tokens
    cache.insert(seq)


def num_found(cache, seq):
    pages = cache.lookup(seq)
    cache.release(pages)
    return len(pages)


def test_finds_full_pages_but_never_the_whole_prompt():
    allocator, cache = make_cache()
    compute(allocator, cache, first := make_sequence("a", list(range(12))))
    assert cache.lookup(make_sequence("b", list(range(13)))) == first.page_table
    assert cache.lookup(make_sequence("c", list(range(12)))) == first.page_table[:2]
    assert cache.lookup(make_sequence("d", [*range(7), 99, *range(8, 12)])) == first.page_table[:1]
    assert cache.lookup(make_sequence("e", [99, *range(1, 12)])) == []
    assert cache.lookup(make_sequence("f", [1])) == []
    cache.check_integrity()


def test_pages_of_generated_tokens_are_kept_too():
    allocator, cache = make_cache()
    seq = make_sequence("a", list(range(6)))
    seq.append(6)
    seq.append(7)
    compute(allocator, cache, seq)
    assert num_found(cache, make_sequence("b", list(range(9)))) == 2


def test_generated_tokens_that_saw_less_than_a_prompts_are_told_apart():
    allocator, cache = make_cache()
    seq = make_sequence("a", list(range(6)))
    seq.keeps_prompt = True
    for token in range(6, 12):
        seq.append(token)
    compute(allocator, cache, seq)
    longer, same = make_sequence("b", list(range(13))), make_sequence("c", list(range(6)))
    for other in (longer, same):
        other.keeps_prompt = True
    for token in range(6, 13):
        same.append(token)
    assert num_found(cache, longer) == 1
    assert num_found(cache, same) == 3


def test_language_digest_decides_not_the_adapter():
    allocator, cache = make_cache()
    prompt = list(range(9))
    compute(allocator, cache, make_sequence("a", prompt, adapter=make_adapter("x")))
    assert num_found(cache, make_sequence("b", prompt)) == 0
    assert num_found(cache, make_sequence("c", prompt, adapter=make_adapter("y"))) == 0
    assert num_found(cache, make_sequence("d", prompt, adapter=make_adapter("x"))) == 2
    compute(allocator, cache, make_sequence("e", prompt))
    assert num_found(cache, make_sequence("f", prompt, adapter=make_adapter(""))) == 2


def test_salt_separates():
    allocator = PageAllocator(8)
    first, second = PrefixCache(PAGE, allocator, salt="1"), PrefixCache(PAGE, allocator, salt="2")
    a, b = make_sequence("a", list(range(9))), make_sequence("b", list(range(9)))
    compute(allocator, first, a)
    compute(allocator, second, b)
    assert not set(a.page_digests) & set(b.page_digests)


@pytest.mark.parametrize(
    ("key", "offset", "start", "found"),
    [("k", 0, 2, 3), ("other", 0, 2, 0), ("k", 1, 2, 0), ("k", 0, 3, 0)],
    ids=["same", "other picture", "other rows", "other place"],
)
def test_media_are_part_of_the_key(key, offset, start, found):
    allocator, cache = make_cache()
    prompt = [MEDIA_TOKEN] * 13
    compute(allocator, cache, make_sequence("a", prompt, media=[MediaSpan(2, 8, "k", 0, 0)]))
    assert num_found(cache, make_sequence("b", prompt, media=[MediaSpan(start, 8, key, 0, offset)])) == found


def test_a_picture_later_does_not_hide_the_text_before_it():
    allocator, cache = make_cache()
    prompt = [1, 2, 3, 4, *[MEDIA_TOKEN] * 8, 5]
    compute(allocator, cache, make_sequence("a", prompt, media=[MediaSpan(4, 8, "one", 0, 0)]))
    assert num_found(cache, make_sequence("b", prompt, media=[MediaSpan(4, 8, "two", 0, 0)])) == 1


@pytest.mark.parametrize(("span", "found"), [((4, 8), 3), ((6, 14), 1), ((0, 14), 0), ((12, 14), 3)])
def test_a_hit_never_ends_inside_a_bidirectional_span(span, found):
    allocator, cache = make_cache()
    prompt = list(range(16))
    media = [MediaSpan(span[0], span[1] - span[0], "k", 0, 0)]
    compute(allocator, cache, make_sequence("a", prompt, media=media, spans=[span]))
    assert num_found(cache, make_sequence("b", prompt, media=media, spans=[span])) == found


def test_trimming_steps_over_several_spans():
    allocator, cache = make_cache()
    prompt, spans = list(range(17)), [(2, 6), (6, 15), (15, 17)]
    compute(allocator, cache, make_sequence("a", prompt, spans=spans))
    assert num_found(cache, make_sequence("b", prompt, spans=spans)) == 0


def test_a_span_of_another_extent_is_another_content():
    allocator, cache = make_cache()
    compute(allocator, cache, make_sequence("a", list(range(13)), spans=[(2, 10)]))
    assert num_found(cache, make_sequence("b", list(range(13)), spans=[(2, 4)])) == 0


def test_equal_pages_are_kept_once():
    allocator, cache = make_cache()
    compute(allocator, cache, first := make_sequence("a", list(range(8))))
    compute(allocator, cache, second := make_sequence("b", list(range(8))))
    assert len(cache) == 2
    cache.release(second.page_table)
    assert allocator.num_free == 32 - 2
    cache.release(first.page_table)
    assert cache.num_evictable == 2
    cache.check_integrity()


def test_eviction_spares_users_and_goes_by_last_use_from_the_end_of_a_chain():
    allocator, cache = make_cache()
    old, new, used = (
        make_sequence(name, [*range(start, start + 9)]) for name, start in (("a", 0), ("b", 20), ("c", 40))
    )
    for seq in (old, new, used):
        compute(allocator, cache, seq)
    for seq in (old, new):
        cache.release(seq.page_table)
    assert cache.num_evictable == 4
    cache.evict(1)
    assert (num_found(cache, new), num_found(cache, old)) == (2, 1)
    cache.evict(1)
    assert (num_found(cache, old), num_found(cache, new)) == (1, 1)
    cache.clear()
    assert (num_found(cache, old), num_found(cache, new), num_found(cache, used)) == (0, 0, 2)
    with pytest.raises(InternalError):
        cache.evict(1)
    cache.check_integrity()


@pytest.mark.parametrize("seed", range(10))
def test_random_walk_finds_only_equal_content(seed):
    """Every page found holds exactly what the sequence would compute there."""
    rng = random.Random(seed)
    allocator, cache = make_cache(num_pages=40)
    adapters = [None, make_adapter("x"), make_adapter("")]
    held, content_of, hits = [], {}, 0
    for step in range(150):
        if held and (rng.random() < 0.45 or len(held) > 6):
            cache.release(held.pop(rng.randrange(len(held))).page_table)
        else:
            seq = random_sequence(rng, str(step), adapters)
            expected, found = contents(seq), cache.lookup(seq)
            hits += len(found)
            assert len(found) * PAGE < seq.num_tokens
            for index, page in enumerate(found):
                assert content_of[page] == expected[index * PAGE : (index + 1) * PAGE]
            missing = -(-seq.num_tokens // PAGE) - len(found)
            if missing > allocator.num_free + cache.num_evictable:
                cache.release(found)
            else:
                cache.evict(max(0, missing - allocator.num_free))
                seq.page_table = found + allocator.allocate(missing)
                seq.num_offered_pages, seq.num_computed = len(found), seq.num_tokens
                for index, page in enumerate(seq.page_table):
                    content_of[page] = expected[index * PAGE : (index + 1) * PAGE]
                cache.insert(seq)
                held.append(seq)
        cache.check_integrity()
        allocator.check_integrity()
    assert hits > 20
