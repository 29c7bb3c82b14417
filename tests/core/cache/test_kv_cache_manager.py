"""Page tables: prefix hits, windows, salts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

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
    second = holder(cache)
    assert cache.find_cached_prefix(second, list(range(12))) == 2  # page 3 holds the last token
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
    second = holder(cache)
    assert cache.find_cached_prefix(second, list(range(17))) == 4
    cache.share_prefix(second, 4)
    assert second.page_tables[0][:2] == [NULL_PAGE, NULL_PAGE]
    assert cache.check_integrity([h, second]) == []


def test_a_hit_is_shortened_to_where_every_window_is_covered() -> None:
    cache = make(None, 6)
    compute(cache, list(range(24)))
    # Take the window group's page 4 away: hits of 5 and 6 pages would look at it, 4 does not.
    pool = cache.pools[1]
    digest_holder = holder(cache)
    assert cache.find_cached_prefix(digest_holder, list(range(25))) == 6
    page = pool.get_cached_page(digest_holder.page_hashes[4])
    assert page is not None
    del pool._page_of_hash[pool._hash_of_page.pop(page)]
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


def test_every_table_of_every_holder_grows_by_a_page() -> None:
    cache = make(None, 6, pages=8)
    holders = [compute(cache, list(range(start, start + 8))) for start in (0, 100)]
    columns = [table[:] for h in holders for table in h.page_tables]
    updates = cache.append_page(holders)
    assert sorted((u.group, u.start) for u in updates) == [(0, 2), (0, 2), (1, 2), (1, 2)]
    grown = [table for h in holders for table in h.page_tables]
    assert [table[:-1] for table in grown] == columns
    assert sorted(page for u in updates for page in u.pages) == sorted(t[-1] for t in grown)
    assert cache.check_integrity(holders) == []
    with pytest.raises(ValueError, match="2 pages requested, 1 are available"):
        cache.append_page(holders)
