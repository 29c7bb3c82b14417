"""Commands with a hostile model folder or file of the user's: one line that names it, and an end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest


@pytest.fixture
def folder(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "model")


def refuse(result, *words):
    (line,) = [line for line in result.err.splitlines() if line.startswith("treadle: ")]
    assert result.code not in (0, None) and "Traceback" not in result.err
    assert [word for word in words if word not in line] == []


def many_layers(folder):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 10**12}))
    return "num_hidden_layers", "1000000000000"


def pipe(folder):
    (folder / "chat_template.jinja").unlink()
    os.mkfifo(folder / "chat_template.jinja")
    return "chat_template.jinja", "a named pipe"


def pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return "no weights", "load_format 'pt'"


@pytest.mark.parametrize("change", [many_layers, pipe, pickle])
def test_generate_refuses_a_hostile_folder(treadle, folder, change):
    words = change(folder)
    refuse(treadle("generate", str(folder), "--prompt", "a"), *words)


def test_serve_refuses_a_hostile_folder(folder):
    words = many_layers(folder)
    command = [sys.executable, "-m", "treadle_cli", "serve", str(folder), "--port", "0"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    refuse(SimpleNamespace(code=process.returncode, err=process.stderr), *words)


def test_files_of_options_are_checked_before_anything_starts(treadle, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for option in ("--config", "--plugin-lock-file", "--plugin-file", "--chat-template"):
        refuse(treadle("generate", option, "pipe", "--prompt", "a"), "pipe", "a named pipe")
    tls = ("--ssl-certfile", "pipe", "--ssl-keyfile", "pipe")
    refuse(treadle("serve", *tls, "--port", "0"), "ssl_certfile", "a named pipe")
