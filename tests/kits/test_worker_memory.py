"""How large the KV cache is on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from treadle.config import from_options
from treadle.errors import ConfigError, OutOfMemoryError
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle_worker_kit.memory import GIB
from treadle_worker_kit.start import start_runner


def cache_pages(tmp_path: Path, **options: Any) -> tuple[int, int]:
    """The pages of a tiny model, and the bytes of one."""
    # A huge model length, so that the size of the cache is the only limit.
    folder = make_checkpoint(tmp_path, max_position_embeddings=2**24)
    config = from_options(model=str(folder), device="cpu", dtype="float32", page_size=16, **options)
    (group,) = start_runner(config, PluginManager(config.plugins)).info.kv_cache_groups
    return group.num_pages, group.page_bytes


@pytest.mark.parametrize("size", [1_000_000, 5_000_000])
def test_the_option_is_the_size_in_bytes(tmp_path: Path, size: int) -> None:
    pages, page_bytes = cache_pages(tmp_path, kv_cache_memory_bytes=size)
    assert pages == size // page_bytes


def test_the_default_is_one_gib(tmp_path: Path) -> None:
    pages, page_bytes = cache_pages(tmp_path)
    assert pages == GIB // page_bytes


def test_num_pages_goes_before_it(tmp_path: Path) -> None:
    pages, _ = cache_pages(tmp_path, kv_cache_memory_bytes=5_000_000, num_pages=40)
    assert pages == 40


def test_a_size_below_two_pages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemoryError, match="raise kv_cache_memory_bytes or lower page_size"):
        cache_pages(tmp_path, kv_cache_memory_bytes=1)
    with pytest.raises(ConfigError, match="option kv_cache_memory_bytes is 0"):
        from_options(kv_cache_memory_bytes=0)
