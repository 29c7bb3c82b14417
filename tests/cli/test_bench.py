"""Workloads are those of docs/how/benchmarks.md, and what is printed was measured."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from treadle.errors import ConfigError, EngineError
from treadle_cli.bench.config import BenchConfig
from treadle_cli.bench.percentiles import LatencyStats, summarize
from treadle_cli.bench.results import select_iteration
from treadle_cli.bench.shapes import known_shapes, shape_folder
from treadle_cli.bench.throughput import check_count
from treadle_cli.bench.workloads import clip_to_vocab, workload

SMALL = ("--kv-cache-memory-bytes", "10000000", "--cpu-threads", "1", "--dtype", "float32")
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
ROOT = Path(__file__).parents[2]
CUSTOM = ("--workload", "custom", "--num-prompts", "3", "--input-len", "8", "--output-len", "4")


@pytest.mark.parametrize(
    ("name", "requests", "prompt_tokens", "output_tokens", "counts"),
    [
        ("mixed", 256, 142_827, 133_966, "output"),
        ("bs1", 1, 128, 256, "output"),
        ("prefill", 16, 16 * 2048, 16, "prompt"),
        ("dec32", 32, 32 * 64, 32 * 256, "output"),
        ("dec256", 256, 256 * 64, 256 * 256, "output"),
        ("custom", 32, 32 * 512, 32 * 128, "output"),
    ],
)
def small_sizes(name, requests, prompt_tokens, output_tokens, counts):
    load = workload(name, BenchConfig())
    assert (len(load.prompts), load.prompt_tokens, load.output_tokens) == (
        requests,
        prompt_tokens,
        output_tokens,
    )
    assert load.counts == counts
    assert all(0 <= token <= 10_000 for prompt in load.prompts for token in prompt)


def test_the_draws_of_mixed():
    """``random.seed(0)``: a length, its ids, the next length …; all output lengths at the end."""
    load = workload("mixed", BenchConfig())
    assert (len(load.prompts[0]), load.prompts[0][:3], load.outputs[:3]) == (
        964,
        [6311, 6890, 663],
        [845, 312, 607],
    )


def test_a_small_vocabulary_keeps_the_sizes():
    clipped = clip_to_vocab(workload("bs1", BenchConfig()), 320)
    assert clipped.prompt_tokens == 128 and max(clipped.prompts[0]) < 320
    assert clip_to_vocab(clipped, 50_000) is clipped


def test_spread():
    assert summarize([]) == LatencyStats()
    assert summarize([0.1]) == LatencyStats(100, 100, 100, 100, 100)
    stats = summarize([i / 1000 for i in range(1, 102)])
    assert (stats.mean, stats.p50, stats.p90, stats.p99, stats.max) == (51, 51, 91, 100, 101)


def test_the_pass_that_is_reported():
    assert select_iteration([3.0, 1.0, 2.0], "best") == 1
    assert select_iteration([3.0, 1.0, 2.0], "median") == 2


def test_a_pass_that_lost_tokens_is_not_a_figure():
    with pytest.raises(EngineError, match="asks for 256 tokens and the engine generated 255"):
        check_count(workload("bs1", BenchConfig()), 255)


def test_shapes(tmp_path, monkeypatch):
    assert {"qwen3-0.6b", "qwen3-8b"} <= set(known_shapes())
    folder = shape_folder("qwen3-8b")
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 4096
    assert shape_folder(str(folder)) == shape_folder(str(folder / "config.json")) == folder
    with pytest.raises(ConfigError, match=r"--hf-config is 'qwen9'.*qwen3-0\.6b, qwen3-8b"):
        shape_folder("qwen9")


@pytest.fixture
def shape(tmp_path):
    """A tiny shape: a config.json and nothing else."""
    file = tmp_path / "shape" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(SHAPE))
    return str(file)


def test_throughput_of_a_shape_without_weights_and_tokenizer(treadle, shape):
    result = treadle(
        *("bench", "throughput", "--hf-config", shape, *SMALL, *CUSTOM),
        *(
            "--workload",
            "custom",
            "--num-iters",
            "3",
            "--num-iters-warmup",
            "0",
            "--pick",
            "median",
        ),
    )
    assert result.code == 0, result.err
    first, second = (json.loads(line) for line in result.out.splitlines())
    assert (first["kind"], first["workload"]) == ("throughput", "custom")
    assert (first["requests"], first["prompt_tokens"], first["output_tokens"]) == (3, 24, 12)
    assert first["wall_seconds"] == sorted(first["iter_seconds"])[1]
    assert first["output_tokens_per_second"] == pytest.approx(12 / first["wall_seconds"], rel=1e-3)
    run_info = first["run_info"]
    assert (run_info["architecture"], run_info["device"], run_info["dtype"]) == (
        "LlamaForCausalLM",
        "cpu",
        "float32",
    )
    assert run_info["startup_seconds"] > 0 and run_info == second["run_info"]


def test_latency(treadle, shape):
    process = treadle(
        "bench",
        "latency",
        "--hf-config",
        shape,
        *SMALL,
        *CUSTOM,
        "--max-concurrency",
        "2",
        "--num-iters",
        "1",
    )
    assert process.code == 0, process.err
    result = json.loads(process.out)
    times = result["latency"]
    assert result["kind"] == "latency" and times["concurrency"] == 2
    assert 0 < times["ttft_ms"]["p50"] <= times["e2e_ms"]["p50"] <= result["wall_seconds"] * 1000
    assert times["itl_ms"]["p50"] > 0


def test_startup_is_measured_in_a_process_of_its_own(treadle, shape):
    process = treadle(
        "bench",
        "startup",
        "--hf-config",
        shape,
        *SMALL,
        "--num-iters",
        "1",
        "--num-iters-warmup",
        "0",
    )
    assert process.code == 0, process.err
    result = json.loads(process.out)
    stages = result["stages"]
    assert list(stages) == [
        "python and imports",
        "download",
        "configuration",
        "weights",
        "cache",
        "kernels",
        "sampler",
    ]
    assert result["kind"] == "startup" and result["iter_seconds"] == [result["first_token_seconds"]]
    assert 0 < sum(stages.values()) <= result["ready_seconds"] + 0.01
    assert result["ready_seconds"] < result["first_token_seconds"]
    assert result["run_info"]["startup_seconds"] == result["ready_seconds"]


def test_a_start_that_fails_is_not_a_figure(treadle, shape):
    options = ("--num-iters", "1", "--num-iters-warmup", "0", "--max-model-len", "100000")
    result = treadle("bench", "startup", "--hf-config", shape, *SMALL, *options)
    assert result.code == 1 and not result.out and result.err.count("\n") == 1
    assert "did not start (exit status 1)" in result.err and "max_model_len is 100000" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--workload", "mixd"),
            "option workload is ['mixd']: Invalid enum value 'mixd' (allowed: mixed, bs1, ",
        ),
        (
            ("--workload", "mixed"),
            "the workload mixed has a sequence of 2011 tokens, the engine takes 256",
        ),
        (("--num-iters", "0"), "option num_iters is 0: Expected `int` >= 1"),
        (("some/model",), "give either MODEL or --hf-config, not both"),
    ],
    ids=lambda v: v[-1] if isinstance(v, tuple) else "",
)
def test_errors(treadle, shape, arguments, message):
    result = treadle("bench", "throughput", "--hf-config", shape, *SMALL, *arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"treadle: {message}") and result.err.count("\n") == 1


def test_step_cost_drives_the_real_engine_loop():
    from treadle_cli.bench.scheduler import BATCH_SIZES, measure_step_cost

    costs = list(measure_step_cost(steps=5))
    assert [cost.running for cost in costs] == list(BATCH_SIZES)
    assert all(0 < cost.median_ms <= cost.p99_ms for cost in costs)


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "benchmarks" / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_vllm_gets_the_same_work() -> None:
    """Its script runs where treadle is not installed, and so draws the requests by itself."""
    peer = script("gpu_peers/with_vllm.py")
    for name in ("bs1", "prefill", "dec32", "dec256", "mixed"):
        ours = workload(name, BenchConfig())
        tokens = ours.prompt_tokens if ours.counts == "prompt" else ours.output_tokens
        assert peer.workload(name) == (ours.prompts, ours.outputs, tokens)
    record = script("structured_output.py").GRAMMARS["record"]
    assert json.loads(record.source) == peer.RECORD


def test_vllm_gets_random_codes() -> None:
    """Its own random weights are floating-point ones alone, and equal codes are multiplied faster."""
    model = torch.nn.Module()
    for dtype in (torch.int8, torch.int32, torch.float32):
        data = torch.zeros(64, 64, dtype=dtype)
        model.register_parameter(str(dtype)[6:], torch.nn.Parameter(data, requires_grad=False))
    script("gpu_peers/with_vllm.py").fill_codes(model)
    assert len(model.int8.unique()) > 200 and len(model.int32.unique()) > 4000
    assert not model.float32.any()
