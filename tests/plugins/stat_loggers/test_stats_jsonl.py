"""A stat logger from end to end, with its options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from treadle import LLM, SamplingParams
from treadle.errors import ConfigError
from treadle.testing.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


def lines(folder: Path, path: Path, **options: float) -> list[dict[str, float]]:
    settings = {"stat_loggers:jsonl": {"path": str(path), **options}}
    with LLM(str(folder), stat_loggers=["jsonl"], plugin_options=settings, cpu_threads=1) as llm:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        llm.generate([[1, 2, 3]], params, use_tqdm=False)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_for_every_step(folder: Path, tmp_path: Path) -> None:
    rows = lines(folder, tmp_path / "s.jsonl", seconds=0)
    assert len(rows) >= 6
    assert [line["generation_tokens"] for line in rows] == sorted(
        line["generation_tokens"] for line in rows
    )
    assert rows[-1]["generation_tokens"] == 6 and rows[-1]["prompt_tokens"] == 3
    assert rows[0]["time"] <= rows[-1]["time"]


def test_not_more_often_than_asked(folder: Path, tmp_path: Path) -> None:
    assert len(lines(folder, tmp_path / "s.jsonl", seconds=1000)) == 1


def test_bad_options_name_themselves(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        lines(folder, tmp_path / "no" / "such" / "folder.jsonl")
    with pytest.raises(ConfigError, match="seconds"):
        lines(folder, tmp_path / "s.jsonl", seconds=-1)
