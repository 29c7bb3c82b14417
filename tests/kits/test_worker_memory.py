"""How large the KV cache is on a CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from treadle.api.step_types import EngineInfo
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
    with pytest.raises(
        OutOfMemoryError, match=r"raise kv_cache_memory_bytes to \d+ .*, or lower page_size"
    ):
        cache_pages(tmp_path, kv_cache_memory_bytes=1)
    with pytest.raises(ConfigError, match="option kv_cache_memory_bytes is 0"):
        from_options(kv_cache_memory_bytes=0)


def start(folder: Path, **options: Any) -> EngineInfo:
    config = from_options(model=str(folder), device="cpu", dtype="float32", page_size=16, **options)
    return start_runner(config, PluginManager(config.plugins)).info


ADVICE = re.compile(r"raise (num_pages|kv_cache_memory_bytes) to (\d+)")


MIXED = {
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


@pytest.mark.parametrize(
    ("architecture", "changes"), [("LlamaForCausalLM", {}), ("Gemma2ForCausalLM", MIXED)]
)
@pytest.mark.parametrize("option", ["num_pages", "kv_cache_memory_bytes"])
def test_what_an_error_advises_suffices(
    architecture: str, changes: dict[str, Any], option: str, tmp_path: Path
) -> None:
    """Also for layers with a sliding window, which share the memory with the others."""
    folder = make_checkpoint(tmp_path, architecture, max_position_embeddings=512, **changes)
    small = {"num_pages": 5, "kv_cache_memory_bytes": 60_000}[option]
    with pytest.raises(ConfigError, match="max_model_len is 512 tokens") as raised:
        start(folder, max_model_len=512, max_num_seqs=9, **{option: small})
    advised = ADVICE.search(str(raised.value))
    assert advised is not None and advised[1] == option
    info = start(folder, max_model_len=512, max_num_seqs=9, **{option: int(advised[2])})
    assert info.max_model_len == 512
    assert (len(info.kv_cache_groups) == 2) == bool(changes)


def test_a_context_that_is_cut_is_reported(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, max_position_embeddings=512)
    info = start(folder, num_pages=5)
    assert info.max_model_len == 64
    (line,) = (line for line in info.report if line.startswith("The context"))
    assert line == (
        "The context is 64 tokens, not the model's 512: the KV cache holds no more. For all of it, "
        "raise num_pages to 33."
    )


def test_a_cache_larger_than_the_machine_names_the_option_that_is_set(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, max_position_embeddings=2**24)
    with pytest.raises(OutOfMemoryError, match="of this machine; lower kv_cache_memory_bytes"):
        start(folder, kv_cache_memory_bytes=2**50, max_num_seqs=10**9)
