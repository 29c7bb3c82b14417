"""Quantized checkpoints by the command: ``treadle generate`` and ``treadle bench``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from quantized_formats.compressed_tensors import UnpackedFormat
from quantized_formats.quark import QuarkFormat

from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.packing import Format, pack_checkpoint

SMALL = ("--kv-cache-memory-bytes", "10000000", "--cpu-threads", "1", "--dtype", "float32")
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
IN_FULL = ("q_proj", "k_proj", "v_proj", "o_proj", ".gate")


class Case(NamedTuple):
    """What is packed of which model; ``flags`` make the same of the model in full, which is then what runs."""

    architecture: str
    format: Format
    changes: dict[str, Any]
    in_full: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


CASES = {
    "quark, FP8": Case("LlamaForCausalLM", QuarkFormat(), {}),
    "quark, int8": Case(
        "LlamaForCausalLM", QuarkFormat("int8", "per_channel", rounds_inputs=True), {}
    ),
    "quark, int4": Case("LlamaForCausalLM", QuarkFormat("uint4", "per_group"), {}),
    "experts_int8": Case(
        "Qwen3MoeForCausalLM",
        UnpackedFormat(),
        EXPERTS,
        IN_FULL,
        ("--quantization", "experts_int8"),
    ),
}


class Folders(NamedTuple):
    source: Path
    packed: Path
    plain: Path


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def folders(case: Case, tmp_path: Path) -> Folders:
    source = make_checkpoint(
        tmp_path / "source", case.architecture, tokenizer=True, hidden_size=128, **case.changes
    )
    made = Folders(source, tmp_path / "packed", tmp_path / "plain")
    pack_checkpoint(*made, case.format, case.in_full)
    return made


def logprobs(result: Any) -> list[float]:
    assert result.code == 0, result.err
    output = json.loads(result.out)["outputs"][0]
    assert len(output["logprobs"]) == 12
    steps = zip(output["token_ids"], output["logprobs"], strict=True)
    return [entries[str(token)]["logprob"] for token, entries in steps]


def test_generate_says_what_the_dequantized_model_says(treadle, case, folders):
    options = (*SMALL, "--temperature", "0", "--ignore-eos", "--max-tokens", "12", "--prompt", "Hi")
    options = (*options, "--json", "--logprobs", "1")
    folder = folders.source if case.flags else folders.packed
    actual = logprobs(treadle("generate", str(folder), *options, *case.flags))
    expected = logprobs(treadle("generate", str(folders.plain), *options))
    in_full = logprobs(treadle("generate", str(folders.source), *options))
    assert actual == pytest.approx(expected, abs=1e-3)
    assert actual != pytest.approx(in_full, abs=2e-3), "nothing is lost, so this shows nothing"


def test_bench_runs_its_shape(treadle, case, folders):
    folder = folders.source if case.flags else folders.packed
    result = treadle(
        *("bench", "throughput", "--hf-config", str(folder / "config.json"), *SMALL, *case.flags),
        *("--workload", "custom", "--num-prompts", "3", "--input-len", "8", "--output-len", "4"),
        *("--num-iters", "1", "--num-iters-warmup", "0"),
    )
    assert result.code == 0, result.err
    measured, *_ = (json.loads(line) for line in result.out.splitlines())
    assert (measured["requests"], measured["output_tokens"]) == (3, 12)
