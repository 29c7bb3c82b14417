"""schemathesis over the OpenAPI document: each answer has a status and a form that the document names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from install import folder_of
from process import served

OPTIONS = ("--max-model-len", "128", "--max-num-seqs", "8", "--served-model-name", "demo")
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,unsupported_method,ignored_auth"
)
KEY = "sesame"


@pytest.mark.slow
def test_every_answer_is_what_the_document_says(tmp_path: Path) -> None:
    folder = folder_of("schemathesis")
    if not folder.is_dir():
        pytest.skip("schemathesis is not installed: python tests/sdks/install.py schemathesis")
    options = (*OPTIONS, "--api-key", KEY, "--files-dir", str(tmp_path / "files"))
    with served(Path("demo:treadle-demo"), tmp_path / "log", *options) as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
        command += ["--header", f"Authorization: Bearer {KEY}", "--checks", CHECKS]
        command += ["--phases", "coverage,fuzzing", "--max-examples", "5", "--seed", "1"]
        command += ["--request-timeout", "60", "--no-color", "--generation-database", "none"]
        result = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": str(folder)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
        )
        server.client.headers["authorization"] = f"Bearer {KEY}"
        assert server.settles(30.0), "requests or pages are left"
    assert result.returncode == 0, result.stdout[-20_000:]
    assert "Traceback" not in (tmp_path / "log").read_text()
