"""Page tables: prefix hits, windows, salts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from treadle.api.step_types import KVCacheGroup
from treadle.cache import NULL_PAGE, KVCacheManager

PAGE = 4


def make(*windows: int | None, pages: int = 32, **options: Any) -> KVCacheManager:
    groups = [KVCacheGroup("full", window, pages, 1, 1) for window in windows]
    return KVCacheManager(groups, PAGE, **options)


def holder(cache: KVCacheManager, salt: str | None = None) -> Any:
    return SimpleNamespace(
        slot=0,
        page_tables=[[] for _ in cache.pools],
        page_hashes=[],
        root_hash=cache.page_hasher.root_hash(salt),
        num_cached_pages=0,
    )


def compute(cache: KVCacheManager, tokens: list[int], salt: str | None = None) -> Any:
    """A sequence that was computed to its end and is still running."""
    h = holder(cache, salt)
    cache.share_prefix(h, cache.find_cached_prefix(h, tokens))
    cache.allocate_pages(h, len(tokens))
    cache.cache_full_pages(h, tokens, len(tokens))
    return h


def test_only_full_pages_are_shared_and_never_the_last_token() -> None:
    cache = make(None)
    compute(cache, list(range(12)))
    other = holder(cache)
    assert cache.find_cached_prefix(other, list(range(12))) == 2  # page 3 holds the last token
    assert cache.find_cached_prefix(holder(cache), list(range(13))) == 3
    assert cache.find_cached_prefix(holder(cache), list(range(11))) == 2
    assert cache.find_cached_prefix(holder(cache), [9, *range(1, 13)]) == 0


def test_a_different_page_ends_the_hit() -> None:
    cache = make(None)
    compute(cache, list(range(16)))
    assert cache.find_cached_prefix(holder(cache), [*range(8), 99, *range(9, 17)]) == 2


def test_salts_and_processes_do_not_share() -> None:
    cache = make(None)
    compute(cache, list(range(16)), salt="a")
    assert cache.find_cached_prefix(holder(cache, "a"), list(range(17))) == 4
    assert cache.find_cached_prefix(holder(cache, "b"), list(range(17))) == 0
    assert cache.find_cached_prefix(holder(cache), list(range(17))) == 0
    assert cache.page_hasher.root_hash("ab") != cache.page_hasher.root_hash("a", "b")
    assert make(None).page_hasher.root_hash() != cache.page_hasher.root_hash()


def test_without_prefix_caching_nothing_matches() -> None:
    cache = make(None, prefix_caching=False)
    compute(cache, list(range(16)))
    assert cache.find_cached_prefix(holder(cache), list(range(17))) == 0


def test_a_window_lets_pages_go_and_still_matches() -> None:
    cache = make(6)
    h = compute(cache, list(range(16)))
    # A token at position 16 sees 11 … 16: columns 0 and 1 are gone, their pages evictable.
    assert h.page_tables[0][:2] == [NULL_PAGE, NULL_PAGE] and NULL_PAGE not in h.page_tables[0][2:]
    assert cache.pools[0].num_used == 2
    other = holder(cache)
    assert cache.find_cached_prefix(other, list(range(17))) == 4
    cache.share_prefix(other, 4)
    assert other.page_tables[0][:2] == [NULL_PAGE, NULL_PAGE]
    assert cache.check_integrity([h, other]) == []


def test_a_hit_is_shortened_to_where_every_window_is_covered() -> None:
    cache = make(None, 6)
    compute(cache, list(range(24)))
    # Take the window group's page 4 away: hits of 5 and 6 pages would look at it, 4 does not.
    lost = cache.pools[1]
    digest_holder = holder(cache)
    assert cache.find_cached_prefix(digest_holder, list(range(25))) == 6
    page = lost.get_cached_page(digest_holder.page_hashes[4])
    assert page is not None
    lost._evict_hash(page)
    assert cache.find_cached_prefix(holder(cache), list(range(25))) == 4


def test_siblings_share_unless_the_leader_has_moved_on() -> None:
    cache = make(None, 4)
    leader = compute(cache, list(range(9)))
    child = holder(cache)
    assert cache.share_tables(child, leader, 2)
    assert child.page_tables[0] == leader.page_tables[0][:2]
    cache.allocate_pages(leader, 20)
    cache.cache_full_pages(leader, list(range(20)), 20)
    late = holder(cache)
    assert not cache.share_tables(late, leader, 2)
    assert late.page_tables == [[], []]
    assert cache.check_integrity([leader, child, late]) == []


def test_capacity_is_that_of_the_groups_without_a_window() -> None:
    assert make(None, pages=10).capacity == 9 * PAGE
    assert make(8, pages=10).capacity > 1 << 20
    assert make(100, pages=10).capacity == 9 * PAGE
