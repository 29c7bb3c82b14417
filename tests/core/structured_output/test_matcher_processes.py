"""An engine whose masks are in shared memory, as those of a card are: a backend may fill them in other processes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from treadle import LLM, SamplingParams, StructuredOutputsParams

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "tag": {"enum": ["a", "b"]}},
    "required": ["name", "tag"],
    "additionalProperties": False,
}


def params(count: int, tokens: int) -> list[SamplingParams]:
    guided = StructuredOutputsParams(json=SCHEMA, backend="llguidance", disable_any_whitespace=True)
    return [
        # Log probabilities: without them steps jump over texts without a choice, each in its own way.
        SamplingParams(
            temperature=2.0, max_tokens=tokens, seed=i, structured_outputs=guided, logprobs=0
        )
        for i in range(count)
    ]


def test_it_writes_the_same_texts_and_leaves_no_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    texts = []
    for is_shared in (False, True):
        with LLM(model=str(folder), cpu_threads=1, num_pages=512, max_num_seqs=48) as llm:
            manager = llm._core._structured_output  # type: ignore[attr-defined]
            if is_shared:
                manager._bitmask.share_memory_()
                llm.generate(["Hello"] * 20, params(20, 2), use_tqdm=False)
                (compiler,) = manager._compilers._compilers.values()
                deadline = time.monotonic() + 60
                while not compiler._compiler._pool._processes:
                    assert time.monotonic() < deadline, "the processes do not start"
                    time.sleep(0.01)
                pids = [p._pid for p in compiler._compiler._pool._processes]
                del compiler
            outputs = llm.generate(["Hello"] * 60, params(60, 150), use_tqdm=False)
            texts.append([output.outputs[0].text for output in outputs])
            ended = [o.outputs[0].text for o in outputs if o.outputs[0].finish_reason == "stop"]
            assert len(ended) > 20
            for text in ended:
                jsonschema.validate(json.loads(text), SCHEMA)
        if is_shared:
            deadline = time.monotonic() + 30
            while any(Path(f"/proc/{pid}").exists() for pid in pids):
                assert time.monotonic() < deadline, "a process outlives its engine"
                time.sleep(0.01)
    assert texts[0] == texts[1]
