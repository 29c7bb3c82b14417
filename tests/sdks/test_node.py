"""The SDKs for Node and the coding agents Codex and Claude Code against a real server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from install import folder_of
from process import Process
from servers import KEY, answers, ends_well
from test_python import CHECKS

SCRIPTS = Path(__file__).with_name("node")
PACKAGES = folder_of("node") / "node_modules"
INSTALL = "python tests/sdks/install.py node"
QUESTION = "What is the capital of Italy?"
CODEX = """
model = "demo"
model_provider = "treadle"
[model_providers.treadle]
name = "treadle"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "TREADLE_KEY"
"""


def executable(name: str) -> str:
    """Return the path of an agent; skips the test if there is none."""
    path = PACKAGES / ".bin" / name
    if not path.exists():
        pytest.skip(f"{name} is not installed: {INSTALL}")
    return str(path)


def run(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a client whose home and working folder is ``folder``, without a terminal."""
    return subprocess.run(
        command,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **environment},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def new_answers(server: Process, before: dict[tuple[str, str], int], route: str) -> dict[str, int]:
    """Return the statuses of the requests of ``route`` since ``before``, and how many had each."""
    return {
        status: count - before.get((path, status), 0)
        for (path, status), count in answers(server).items()
        if path == route and count > before.get((path, status), 0)
    }


@pytest.mark.parametrize(
    ("name", "package"), [("openai", "openai"), ("anthropic", "@anthropic-ai/sdk")]
)
def test_sdk(name: str, package: str, server: Process, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None or not (PACKAGES / package).is_dir():
        pytest.skip(f"node or {package} is not installed: {INSTALL}")
    command = [node, str(SCRIPTS / f"use_{name}.cjs"), server.url, KEY]
    result = run(command, tmp_path, NODE_PATH=str(PACKAGES))
    assert result.returncode == 0, result.stderr
    assert set(result.stdout.split()) >= CHECKS
    ends_well(server)


@pytest.mark.slow
def test_codex(server: Process, tmp_path: Path) -> None:
    codex = executable("codex")
    (tmp_path / "config.toml").write_text(CODEX.format(url=server.url))
    before = answers(server)
    result = run(
        [codex, "exec", "--json", "--skip-git-repo-check", QUESTION],
        tmp_path,
        CODEX_HOME=str(tmp_path),
        TREADLE_KEY=KEY,
    )
    events: list[Any] = [json.loads(x) for x in result.stdout.splitlines() if x.startswith("{")]
    assert result.returncode == 0, (events, result.stderr)
    assert events[-1]["type"] == "turn.completed" and events[-1]["usage"]["output_tokens"] > 0
    assert any(e.get("item", {}).get("type") == "agent_message" for e in events), events
    assert new_answers(server, before, "/v1/responses").keys() == {"200"}
    ends_well(server)


@pytest.mark.slow
def test_claude_code(server: Process, tmp_path: Path) -> None:
    """One of its tools, because a CPU takes minutes to read the descriptions of all."""
    claude = executable("claude")
    before = answers(server)
    result = run(
        [claude, "--print", "--tools", "Read", "--output-format", "json", QUESTION],
        tmp_path,
        ANTHROPIC_BASE_URL=server.url,
        ANTHROPIC_AUTH_TOKEN=KEY,
        ANTHROPIC_MODEL="demo",
        ANTHROPIC_SMALL_FAST_MODEL="demo",
        CLAUDE_CODE_MAX_OUTPUT_TOKENS="100",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    assert result.returncode == 0, (result.stdout, result.stderr)
    answer = json.loads(result.stdout)
    answer = answer[-1] if isinstance(answer, list) else answer
    assert answer["result"] and not answer["is_error"], answer
    assert answer["usage"]["output_tokens"] > 0, answer
    assert new_answers(server, before, "/v1/messages").keys() == {"200"}
    ends_well(server)
