"""What a start reports, and what it says when memory does not suffice."""

from __future__ import annotations

from pathlib import Path

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
    option_line,
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


def test_the_lines_of_a_card() -> None:
    full = KVCacheGroup("full", None, 1001, 28, GIB // 100)
    lines = list(memory_lines(facts(full), CARD, 8192))
    assert lines == [
        "weights        16.000 GiB",
        "activations     2.000 GiB in a step of 8192 tokens",
        "KV cache       90.000 GiB: 1001 pages x 64 = 64064 tokens (full), "
        "enough for 15.6 sequences of 4096 tokens",
    ]


def test_a_rank_has_a_line_for_what_it_shares() -> None:
    full = KVCacheGroup("full", None, 1001, 28, GIB // 100)
    lines = list(memory_lines(facts(full), MemoryUsage(weights=GIB, shared=96 << 20), 1))
    assert lines[-1] == "shared          0.094 GiB of symmetric buffers between ranks"


def test_the_group_with_the_least_room_decides() -> None:
    full, sliding = KVCacheGroup("full", None, 641, 4, 1), KVCacheGroup("sliding", 512, 31, 4, 1)
    assert max_pages_per_sequence(4096, 512, 64) == 10
    assert "enough for 3.0 sequences" in list(memory_lines(facts(full, sliding), CARD, 1))[-1]


def test_what_each_option_frees() -> None:
    config = from_options(max_num_seqs=256, max_num_batched_tokens=8192)
    assert savings(config, CARD) == [
        ("kv_cache_dtype=fp8_e4m3 for as many tokens", 45 * GIB),
        ("quantization=fp8", 7 * GIB),
        ("max_num_batched_tokens=4096", GIB),
        ("enforce_eager", GIB),
        ("max_num_seqs=128", GIB // 2),
    ]
    assert option_line(config, CARD).endswith("gpu_memory_utilization: 0.01 is 1.400 GiB")
    narrow = from_options(kv_cache_dtype="fp8_e5m2")
    assert not any("kv_cache_dtype" in option for option, _ in savings(narrow, CARD))
    on_cpu = MemoryUsage(weights=GIB, quantizable=GIB, cache=GIB)
    assert [option for option, _ in savings(config, on_cpu)] == [
        "kv_cache_dtype=fp8_e4m3 for as many tokens"
    ]


def test_a_lack_of_memory_is_told_with_figures_and_options() -> None:
    config = from_options()
    with pytest.raises(OutOfMemoryError) as raised:
        count_pages(config, [GIB], [None], 64, 4096, GIB, CARD)
    text = str(raised.value)
    for part in (
        "1.00 GiB are left", "needs 2.00 GiB", "0.9 of 140.0 GiB allows 126.00",
        "weights take 16.00", "a step 2.00", "everything else on the device 107.00",
        "(0.01 is 1.40 GiB)", "quantization=fp8 (7.00 GiB)",
    ):  # fmt: skip
        assert part in text, text
    with pytest.raises(OutOfMemoryError, match="raise kv_cache_memory_bytes or lower page_size"):
        count_pages(config, [GIB], [None], 64, 4096, GIB, MemoryUsage())


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
        OutOfMemoryError, match=r"\d+\.\d\d GiB of KV cache are more than .*; lower num_p"
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
    assert "1.3 s: first 0.0 s, second 1.3 s" in line
    age = process_seconds()
    assert age is None or (age > 0 and "after the process began" in line)


def test_a_started_model_reports(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    config = from_options(model=str(folder), device="cpu", num_pages=33, page_size=16)
    started = start_runner(config, PluginManager(config.plugins)).info
    titles = [line.split("  ")[0] for line in started.report]
    assert titles == ["weights", "KV cache", "would free", "start"]
    assert "33 pages x 16 = 528 tokens (full), enough for 2.0 sequences" in started.report[1]
    assert list(started.stages) == [
        "download",
        "configuration",
        "weights",
        "cache",
        "kernels",
        "sampler",
    ]
