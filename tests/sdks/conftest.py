"""One server for all clients; makes the helpers of the server's tests importable."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.with_name("server"))]

from process import Process, served  # noqa: E402
from servers import KEY  # noqa: E402

CONTEXT = json.dumps({"max_position_embeddings": 65536})
"""Codex and Claude Code send more than the demo model has room for."""
OPTIONS = ("--served-model-name", "demo", "--api-key", KEY, "--hf-overrides", CONTEXT)


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with served(Path("demo:treadle-demo"), log, *OPTIONS) as process:
        process.client.headers["authorization"] = f"Bearer {KEY}"
        yield process
