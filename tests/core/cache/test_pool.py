"""The page pool: states of a page, eviction order, and that its own check finds damage."""

from __future__ import annotations

import pytest

from treadle.cache import NULL_PAGE, PagePool


def test_hands_out_every_page_but_the_null_page() -> None:
    pool = PagePool(5)
    pages = pool.take(4)
    assert sorted(pages) == [1, 2, 3, 4]
    assert pool.available == 0 and pool.used == 4
    with pytest.raises(ValueError, match="1 pages requested, 0 are available"):
        pool.take(1)


def test_free_pages_are_reused_last_in_first_out() -> None:
    pool = PagePool(6)
    pages = pool.take(3)
    pool.release(pages)
    assert pool.take(1) == [pages[0]]


def test_named_pages_survive_release_until_they_are_needed() -> None:
    pool = PagePool(4)
    a, b, c = pool.take(3)
    for page, digest in ((a, b"a"), (b, b"b")):
        pool.name(page, digest)
    pool.release([a, b, c])
    assert pool.available == 3
    assert pool.find(b"a") == a
    pool.share([a])
    assert pool.used == 1
    # The unnamed page goes first, then the only evictable one, whose name is forgotten.
    assert pool.take(2) == [c, b]
    assert pool.find(b"b") is None and pool.find(b"a") == a


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    pool = PagePool(4)
    pages = pool.take(3)
    for page in pages:
        pool.name(page, bytes([page]))
    pool.release(pages)
    assert pool.take(3) == pages[::-1]


def test_a_page_is_free_only_when_nobody_holds_it() -> None:
    pool = PagePool(3)
    (page,) = pool.take(1)
    pool.share([page, NULL_PAGE])
    pool.release([page])
    assert pool.used == 1
    pool.release([page])
    assert pool.used == 0
    with pytest.raises(ValueError, match=f"page {page} is freed, but it is not in use"):
        pool.release([page])


def test_the_first_page_with_a_name_keeps_it() -> None:
    pool = PagePool(4)
    a, b = pool.take(2)
    pool.name(a, b"x")
    pool.name(b, b"x")
    assert pool.find(b"x") == a
    pool.release([b])
    pool.release([a])
    pool.reset()
    assert pool.find(b"x") is None and pool.available == 3


def test_faults_are_found() -> None:
    pool = PagePool(4)
    table = pool.take(2)
    assert pool.faults([table]) == []
    assert pool.faults([]) == [
        f"page {p} has 1 references, but is in 0 tables" for p in sorted(table)
    ]
    pool._free.append(table[0])
    assert any("must be either in use" in fault for fault in pool.faults([table]))
