"""``LLM`` renders the templates of strangers as a server does: elsewhere, and with limits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from treadle import LLM, SamplingParams
from treadle.errors import RequestError
from treadle.testing.checkpoints import make_checkpoint

MESSAGES: Any = [{"role": "user", "content": "hello"}]
PARAMS = SamplingParams(max_tokens=2, temperature=0)


def test_a_template_costs_its_own_request(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, tokenizer=True, num_hidden_layers=1)
    (folder / "chat_template.jinja").write_text(
        "{% if messages[0].content == 'hello' %}{{ 'x'.ljust(2000000000) | length }}{% else %}"
        "{{ messages[0].content }}{% endif %}"
    )
    with LLM(str(folder), device="cpu", cpu_threads=1, num_pages=16) as llm:
        assert child_of(llm) is None, "whoever does not chat pays for no process"
        with pytest.raises(RequestError, match=r"MemoryError|memory is limited to 1024 MiB"):
            llm.chat(MESSAGES, PARAMS, use_tqdm=False)
        good: Any = [{"role": "user", "content": "hi"}]
        (output,) = llm.chat(good, PARAMS, use_tqdm=False)
        assert output.prompt == "hi" and output.outputs[0].finish_reason == "length"
        pid = child_of(llm)
    with pytest.raises(ProcessLookupError):
        os.kill(pid or 0, 0)


def child_of(llm: LLM) -> int | None:
    renderer: Any = llm._assets.renderer
    (pid,) = renderer._isolated.pids
    return None if pid is None else int(pid)
