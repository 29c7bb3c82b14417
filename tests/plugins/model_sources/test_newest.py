"""The source ``newest`` takes the newest checkpoint that is all there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from treadle import LLM, SamplingParams
from treadle.errors import CheckpointError
from treadle.testing.checkpoints import make_checkpoint


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for age, name in enumerate(("step-3", "step-2", "step-1")):
        folder = make_checkpoint(tmp_path / name, "LlamaForCausalLM", seed=age, shard_size="100KB")
        for path in folder.iterdir():
            os.utime(path, (10**9 - age * 100,) * 2)
    return tmp_path


def resolved_name(runs: Path) -> str:
    from treadle_newest.source import NewestSource

    from treadle.api.types import ModelRef

    return NewestSource().resolve(ModelRef("newest", str(runs)), patterns=["*"]).root.name


def test_the_newest_is_taken_and_half_written_ones_are_not(runs: Path) -> None:
    assert resolved_name(runs) == "step-3"
    shard = next((runs / "step-3").glob("model-00001*"))
    shard.rename(shard.with_suffix(".tmp"))
    assert resolved_name(runs) == "step-2"
    (runs / "step-2" / "config.json").write_text('{"half": ')
    assert resolved_name(runs) == "step-1"
    (runs / "step-1" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        resolved_name(runs)


def test_it_serves_an_engine(runs: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with (
        LLM(f"newest:{runs}", cpu_threads=1) as newest,
        LLM(str(runs / "step-3"), cpu_threads=1) as direct,
    ):
        actual, expected = (
            llm.generate([[5, 6]], params, use_tqdm=False)[0].outputs[0].token_ids
            for llm in (newest, direct)
        )
    assert actual == expected


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(CheckpointError, match="newest:/no/such is not a folder"):
        resolved_name(Path("/no/such"))


def test_index_without_map(runs: Path) -> None:
    (runs / "step-3" / "model.safetensors.index.json").write_text(json.dumps([]))
    assert resolved_name(runs) == "step-2"
