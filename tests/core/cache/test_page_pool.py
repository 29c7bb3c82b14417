"""The page pool: states of a page, eviction order, and that its own check finds damage."""

from __future__ import annotations

import pytest

from treadle.cache import NULL_PAGE, PagePool


def test_hands_out_every_page_but_the_null_page() -> None:
    pool = PagePool(5)
    pages = pool.allocate(4)
    assert sorted(pages) == [1, 2, 3, 4]
    assert pool.num_available == 0 and pool.num_used == 4
    with pytest.raises(ValueError, match="1 pages requested, 0 are available"):
        pool.allocate(1)


def test_free_pages_are_reused_last_in_first_out() -> None:
    pool = PagePool(6)
    pages = pool.allocate(3)
    pool.free(pages)
    assert pool.allocate(1) == [pages[0]]


def test_named_pages_survive_release_until_they_are_needed() -> None:
    pool = PagePool(4)
    a, b, c = pool.allocate(3)
    for page, digest in ((a, b"a"), (b, b"b")):
        pool.cache_page(page, digest)
    pool.free([a, b, c])
    assert pool.num_available == 3
    assert pool.get_cached_page(b"a") == a
    pool.add_reference([a])
    assert pool.num_used == 1
    # The unnamed page goes first, then the only evictable one, whose name is forgotten.
    assert pool.allocate(2) == [c, b]
    assert pool.get_cached_page(b"b") is None and pool.get_cached_page(b"a") == a


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    pool = PagePool(4)
    pages = pool.allocate(3)
    for page in pages:
        pool.cache_page(page, bytes([page]))
    pool.free(pages)
    assert pool.allocate(3) == pages[::-1]


def test_a_page_is_free_only_when_nobody_holds_it() -> None:
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    pool.add_reference([page, NULL_PAGE])
    pool.free([page])
    assert pool.num_used == 1
    pool.free([page])
    assert pool.num_used == 0
    with pytest.raises(ValueError, match=f"page {page} is freed, but it is not in use"):
        pool.free([page])


def test_the_first_page_with_a_name_keeps_it() -> None:
    pool = PagePool(4)
    a, b = pool.allocate(2)
    pool.cache_page(a, b"x")
    pool.cache_page(b, b"x")
    assert pool.get_cached_page(b"x") == a
    pool.free([b])
    pool.free([a])
    assert pool.num_available == 3
    pool.allocate(3)
    assert pool.get_cached_page(b"x") is None


def test_faults_are_found() -> None:
    pool = PagePool(4)
    table = pool.allocate(2)
    assert pool.check_integrity([table]) == []
    assert pool.check_integrity([]) == [
        f"page {p} has 1 references, but is in 0 tables" for p in sorted(table)
    ]
    pool._free.append(table[0])
    assert any("must be either in use" in fault for fault in pool.check_integrity([table]))
