"""What a start reports, and what it says when memory does not suffice."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from treadle.api.step_types import EngineInfo, KVCacheGroup
from treadle.config import from_options
from treadle.errors import OutOfMemoryError
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle_worker_kit.memory import (
    GIB,
    MemoryUsage,
    count_pages,
    explain_out_of_memory,
    max_pages_per_sequence,
    savings,
)
from treadle_worker_kit.report import (
    memory_lines,
    process_seconds,
    stage_line,
)
from treadle_worker_kit.start import start_runner

CARD = MemoryUsage(
    total=140 * GIB, weights=16 * GIB, quantizable=14 * GIB, activations=2 * GIB, cache=90 * GIB,
    graphs=GIB,
)  # fmt: skip


def facts(*groups: KVCacheGroup) -> EngineInfo:
    return EngineInfo(
        model="m", architecture="a", dtype="bfloat16", device="cuda:0", vocab_size=320,
        max_model_len=4096, page_size=64, kv_cache_groups=list(groups), num_async_steps=1, eos_token_ids=[2],
    )  # fmt: skip


def test_what_a_card_holds_is_told_in_sentences() -> None:
    full = KVCacheGroup("full", None, 1001, 28, 90 * GIB // 1001)
    config = from_options(max_num_seqs=256, max_num_batched_tokens=8192)
    assert list(memory_lines(config, facts(full), CARD)) == [
        "The weights take 16.0 GiB, the activations of a step of 8,192 tokens 2.0 GiB, "
        "the CUDA graphs 1.0 GiB.",
        "The KV cache of 90.0 GiB holds 64,000 tokens: 15 requests of the full context of 4,096.",
        "kv_cache_dtype=fp8_e4m3 frees 45.0 GiB for as many tokens.",
        "quantization=fp8 frees 7.0 GiB.",
        "Halving max_num_batched_tokens to 4096 frees 1.0 GiB.",
        "enforce_eager frees 1.0 GiB.",
        "Halving max_num_seqs to 128 frees 0.5 GiB.",
        "Lowering gpu_memory_utilization by 0.01 leaves 1.4 GiB to others.",
    ]


def test_a_rank_tells_what_it_shares() -> None:
    full = KVCacheGroup("full", None, 1001, 28, GIB // 100)
    usage = MemoryUsage(weights=GIB, shared=96 << 20)
    first, *_ = memory_lines(from_options(), facts(full), usage)
    assert first == "The weights take 1.0 GiB, the buffers that ranks share 96.0 MiB."


def test_the_group_with_the_least_room_decides() -> None:
    full, sliding = KVCacheGroup("full", None, 641, 4, 1), KVCacheGroup("sliding", 512, 31, 4, 1)
    assert max_pages_per_sequence(4096, 512, 64) == 10
    cache = list(memory_lines(from_options(), facts(full, sliding), CARD))[1]
    assert "40,960 tokens (full) and 1,920 tokens (sliding): 3 requests of" in cache


@pytest.mark.parametrize("windows", [[None], [None, 64], [64]])
@pytest.mark.parametrize("seqs", [2, 7, 64])
def test_what_half_of_the_sequences_free_is_what_a_start_with_them_takes(
    seqs: int, windows: list[int | None]
) -> None:
    """A cache that all sequences fill becomes smaller with fewer of them."""
    sizes = [1000 * (i + 1) for i in range(len(windows))]

    def cache(seqs: int) -> tuple[list[int], int]:
        config = from_options(max_num_seqs=seqs)
        pages = count_pages(config, sizes, windows, 16, 512, GIB, MemoryUsage())
        return pages, sum(n * size for n, size in zip(pages, sizes, strict=True))

    pages, used = cache(seqs)
    groups = [
        KVCacheGroup("full", window, n, 1, size)
        for window, n, size in zip(windows, pages, sizes, strict=True)
    ]
    info = msgspec.structs.replace(facts(*groups), page_size=16, max_model_len=512)
    freed = dict(savings(from_options(max_num_seqs=seqs), MemoryUsage(cache=used), info))
    assert freed[f"halving max_num_seqs to {seqs // 2}"] == used - cache(seqs // 2)[1] > 0
    fixed = from_options(max_num_seqs=seqs, num_pages=40)
    assert not any("seqs" in option for option, _ in savings(fixed, MemoryUsage(cache=used), info))


def test_what_each_option_frees() -> None:
    config = from_options(max_num_seqs=256, max_num_batched_tokens=8192)
    assert savings(config, CARD) == [
        ("kv_cache_dtype=fp8_e4m3", 45 * GIB),
        ("quantization=fp8", 7 * GIB),
        ("halving max_num_batched_tokens to 4096", GIB),
        ("enforce_eager", GIB),
        ("halving max_num_seqs to 128", GIB // 2),
    ]
    narrow = from_options(kv_cache_dtype="fp8_e5m2")
    assert not any("kv_cache_dtype" in option for option, _ in savings(narrow, CARD))
    on_cpu = MemoryUsage(weights=GIB, quantizable=GIB, cache=GIB)
    assert [option for option, _ in savings(config, on_cpu)] == ["kv_cache_dtype=fp8_e4m3"]
    alone = from_options(max_num_seqs=1)
    assert not any("max_num_seqs" in option for option, _ in savings(alone, CARD))


def test_a_lack_of_memory_is_told_with_figures_and_options() -> None:
    config = from_options()
    with pytest.raises(OutOfMemoryError) as raised:
        count_pages(config, [GIB], [None], 64, 4096, GIB, CARD)
    text = str(raised.value)
    for part in (
        "1.0 GiB are left", "needs 2.0 GiB", "0.9 of 140.0 GiB allows 126.0 GiB",
        "weights take 16.0 GiB", "a step 2.0 GiB", "everything else on the device 107.0 GiB",
        "raise gpu_memory_utilization to 0.91", "quantization=fp8 frees 7.0 GiB",
    ):  # fmt: skip
        assert part in text, text
    with pytest.raises(
        OutOfMemoryError, match=rf"raise kv_cache_memory_bytes to {2 * GIB} .*, or lower page_size"
    ):
        count_pages(config, [GIB], [None], 64, 4096, GIB, MemoryUsage())
    full = msgspec.structs.replace(config.cache, gpu_memory_utilization=0.98)
    config = msgspec.structs.replace(config, cache=full)
    with pytest.raises(OutOfMemoryError, match=r"free 1.0 GiB on the device, or raise tensor_par"):
        count_pages(config, [GIB], [None], 64, 4096, GIB, CARD)


def test_torchs_lack_of_memory_becomes_ours() -> None:
    with (
        pytest.raises(OutOfMemoryError, match="while loading the weights; buy a larger one"),
        explain_out_of_memory(torch.device("cpu"), "loading the weights", "buy a larger one"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_cache_that_no_machine_holds(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    config = from_options(model=str(folder), device="cpu", num_pages=10**12)
    with pytest.raises(
        OutOfMemoryError,
        match=r"[\d,.]+ GiB of KV cache are more than .* of this machine; lower num_p",
    ):
        start_runner(config, PluginManager(config.plugins))


def test_other_errors_stay_what_they_are() -> None:
    with (
        pytest.raises(RuntimeError, match="a shape") as raised,
        explain_out_of_memory(torch.device("cpu"), "loading the weights", ""),
    ):
        raise RuntimeError("a shape")
    assert type(raised.value) is RuntimeError


def test_stages_follow_each_other() -> None:
    line = stage_line({"first": 0.0, "second": 1.26})
    assert line.startswith("The start took 1.3 s: first 0.0 s, second 1.3 s")
    age = process_seconds()
    assert age is None or (age > 0 and "after the process began" in line)


def test_a_started_model_reports(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    config = from_options(model=str(folder), device="cpu", num_pages=33, page_size=16)
    started = start_runner(config, PluginManager(config.plugins)).info
    *_, weights, cache, dtype, steps, start = started.report
    assert steps.startswith("Steps run ")
    assert weights.startswith("The weights take ") and start.startswith("The start took ")
    assert cache.endswith(" holds 512 tokens: 2 requests of the full context of 256.")
    assert dtype.startswith("kv_cache_dtype=fp8_e4m3 frees ")
    assert all(line.endswith(".") for line in started.report)
    assert list(started.stages) == [
        "download",
        "configuration",
        "weights",
        "cache",
        "kernels",
        "sampler",
    ]
