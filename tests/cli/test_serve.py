"""``weft serve``: flags and file reach the server, and a signal ends it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request

SMALL = ("--cpu-cache-gib", "0.01", "--threads", "1")


def test_it_serves_until_sigterm(checkpoint, tmp_path):
    file = tmp_path / "deployment.toml"
    file.write_text(
        '[model]\nserved_model_name = ["loom"]\n[server]\nport = 1\n[sampling]\nn = 2\n'
    )
    command = ("serve", checkpoint, *SMALL, "--config", str(file), "--port", "0")
    process = subprocess.Popen(
        [sys.executable, "-m", "weft_cli", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        seen = ""
        while (found := re.search(r"http://127\.0\.0\.1:\d+", seen)) is None:
            line = process.stdout.readline()
            assert line, f"the server ended: {seen}"
            seen += line
        with urllib.request.urlopen(f"{found[0]}/v1/models", timeout=30) as response:
            assert json.load(response)["data"][0]["id"] == "loom"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_wrong_options_of_both_kinds(weft, checkpoint):
    done = weft("serve", checkpoint, "--port", "70000")
    assert done.code == 2 and done.err.startswith(
        "weft: option port is 70000: Expected `int` <= 65535"
    )
    done = weft("serve", checkpoint, "--max-num-seqs", "0")
    assert done.code == 2 and done.err.startswith("weft: option max_num_seqs is 0")


def test_without_weft_server(weft, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = weft("serve")
    assert (done.code, done.err) == (1, "weft: weft serve needs the server; install weft-server\n")
