"""``treadle serve``: flags and file reach the server, and a signal ends it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

SMALL = ("--kv-cache-memory-bytes", "10000000", "--cpu-threads", "1")


TREADLE = (sys.executable, "-m", "treadle_cli")


def run(*arguments):
    return subprocess.run([*TREADLE, *arguments], capture_output=True, text=True, timeout=60)


@contextmanager
def serving(*arguments):
    """``treadle serve`` in a process of its own: the process and its address."""
    process = subprocess.Popen(
        [*TREADLE, "serve", *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output = ""
        while (address := re.search(r"http://127\.0\.0\.1:\d+", output)) is None:
            line = process.stdout.readline()
            assert line, f"the server ended: {output}"
            output += line
        yield process, address[0]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_it_serves_until_sigterm(checkpoint, tmp_path):
    file = tmp_path / "deployment.toml"
    file.write_text(
        '[model]\nserved_model_name = ["loom"]\n[server]\nport = 1\n[sampling]\nn = 2\n'
    )
    with serving(checkpoint, *SMALL, "--config", str(file)) as (process, url):
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as response:
            assert json.load(response)["data"][0]["id"] == "loom"
        listed = {server["pid"]: server for server in json.loads(run("ps", "--json").stdout)}
        assert (listed[process.pid]["models"], listed[process.pid]["url"]) == (["loom"], url)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    assert str(process.pid) not in run("ps").stdout.split()


def test_it_serves_only_with_the_plugins_that_are_locked(checkpoint, tmp_path):
    """The way of a deployment: what was tested is written down, and nothing else starts."""
    lock = tmp_path / "treadle.lock"
    result = run("plugin", "lock", "--allow-editable", str(lock))
    assert (result.returncode, result.stderr) == (0, "") and lock.exists()
    with (
        serving(checkpoint, *SMALL, "--plugin-lock-file", str(lock)) as (_, url),
        urllib.request.urlopen(f"{url}/ready", timeout=30) as response,
    ):
        assert response.status == 200

    content = json.loads(lock.read_bytes())
    (fcfs,) = (row for row in content["plugins"] if row["id"] == "scheduling_policies:fcfs")
    version, fcfs["version"] = fcfs["version"], "0.0.9"
    missing = {
        "id": "scheduling_policies:gone",
        "distribution": "acme",
        "version": "1",
        "generation": 1,
    }
    content["plugins"].append(missing)
    content["plugins"] = [row for row in content["plugins"] if row["id"] != "renderers:jinja"]
    lock.write_text(json.dumps(content))
    result = run("serve", checkpoint, *SMALL, "--port", "0", "--plugin-lock-file", str(lock))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines() == [
        f"treadle: plugins are not as {lock} says (- is locked, + is installed):",
        f"  + renderers:jinja (v1) from treadle-jinja {version}",
        "  - scheduling_policies:fcfs (v1) from treadle-core 0.0.9",
        f"  + scheduling_policies:fcfs (v1) from treadle-core {version}",
        "  - scheduling_policies:gone (v1) from acme 1",
        f"install what it says, or write it anew with treadle plugin lock {lock}",
    ]


def test_wrong_options_of_both_kinds(treadle, checkpoint):
    result = treadle("serve", checkpoint, "--port", "70000")
    assert result.code == 2 and result.err.startswith(
        "treadle: option port is 70000: Expected `int` <= 65535"
    )
    result = treadle("serve", checkpoint, "--max-num-seqs", "0")
    assert result.code == 2 and result.err.startswith("treadle: option max_num_seqs is 0")


def test_without_treadle_server(treadle, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = treadle("serve")
    assert (result.code, result.err) == (
        2,
        "treadle: treadle serve needs the server; from a clone: pip install './server'\n",
    )


def test_explain_says_what_would_be_chosen_and_starts_nothing(treadle, monkeypatch, tmp_path):
    """The model has no weights: none are read."""
    from treadle.testing.checkpoints import make_tokenizer, tiny_config

    folder = make_tokenizer(tmp_path)
    tiny_config().save_pretrained(folder)
    template = "{{ messages }}<tool_call>arguments</tool_call><think></think>"
    (folder / "chat_template.jinja").write_text(template)
    monkeypatch.setenv("COLUMNS", "80")
    result = treadle("serve", str(folder), "--explain", "--device", "cpu")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= 80
    chosen = {line.split()[0]: line.split()[1] for line in lines if not line.startswith(" ")}
    assert chosen == {
        "model-source": "file",
        "tokenizer-mode": "auto",
        "renderer": "jinja",
        "architecture": "LlamaForCausalLM",
        "load-format": "auto:",
        "quantization": "none:",
        "device": "cpu:",
        "dtype": "float32:",
        "attention-backend": "sdpa",
        "kernels": "treadle's",
        "distributed-executor-backend": "uni",
        "scheduling-policy": "fcfs",
        "structured-output-backends": "llguidance",
        "tool-call-parser": "hermes",
        "reasoning-parser": "qwen3",
    }
    words = " ".join(result.out.split())
    assert "not flashinfer, triton, xformers: device 'cpu' is not CUDA" in words
    assert re.search(r"not [^:]*\bllama3_json\b[^:]*: sees nothing of its own", words)
    off = treadle("serve", str(folder), "--explain", "--tool-call-parser", "none").out
    assert f"{'tool-call-parser':<30}none: --tool-call-parser none" in off
    for command in ("generate", "chat"):
        engine = treadle(command, str(folder), "--explain", "--device", "cpu")
        assert engine.code == 0 and engine.out == result.out


def test_explain_of_an_ambiguous_model_lists_the_candidates(treadle, checkpoint, tmp_path):
    plugin = tmp_path / "two.py"
    plugin.write_text(
        "from treadle.api import impl\nfrom treadle.api.matching import Match\n"
        'TREADLE = {"reasoning_parsers": ["one", "two"]}\n'
        "@impl\ndef treadle_match(kind, key, model):\n"
        '    return Match(100, f"{key} is for all") if kind == "reasoning_parsers" else None\n'
    )
    result = treadle("serve", checkpoint, "--explain", "--plugin-file", str(plugin))
    assert result.code == 0
    text = " ".join(result.out.split())
    assert "reasoning-parser none: several reasoning_parsers match this model equally well" in text
    assert re.search(r"--reasoning-parser NAME: one from two.py \w+: one is for all two from", text)


def test_help_ends_with_the_options_of_plugins(treadle, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = treadle("serve", "--help")
    text = result.out.partition("Options of plugins:")[2]
    assert "--plugin.renderers.jinja.chat_template <string|null>" in text
    assert "Time between two lines; 0 writes one for every step. (default: 10.0)" in " ".join(
        text.split()
    )
    assert "--plugin.executors.ray.placement <PACK|SPREAD|STRICT_PACK|STRICT_SPREAD>" in text
    assert "--disable-plugin" not in text and "--port" not in text
    assert "Options of plugins" not in treadle("generate", "--help").out


def test_help_goes_without_a_plugin_that_is_broken(treadle, monkeypatch):
    monkeypatch.setenv("TREADLE_DISABLED_PLUGINS", "treadle-stats-jsonl")
    monkeypatch.setitem(sys.modules, "treadle_executor_ray", None)
    result = treadle("serve", "--help")
    assert result.code == 0 and "renderers.jinja" in result.out
    assert "plugin.stat_loggers" not in result.out and "plugin.executors.ray" not in result.out
