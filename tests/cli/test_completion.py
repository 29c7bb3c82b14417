"""What Tab completes, through the scripts that shells run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from treadle.plugins import PluginManager
from treadle_cli.completion import KINDS, completer_of, model_names, plugin_keys
from treadle_cli.flags import ENGINE


@pytest.fixture
def complete(monkeypatch, capsys):
    """The words that bash would offer for a line, in this process."""
    from treadle_cli.main import main

    def words(line: str) -> list[str]:
        monkeypatch.setenv("_TREADLE_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        with pytest.raises(SystemExit) as ended:
            main([])
        assert ended.value.code == 0
        return capsys.readouterr().out.split()

    return words


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("treadle p", ["ps", "pull", "plugin"]),
        ("treadle serve --tool-call-parser her", ["hermes"]),
        ("treadle serve --reasoning-parser qw", ["qwen3"]),
        ("treadle serve --dtype b", ["bfloat16"]),
        ("treadle serve --max-num-s", ["--max-num-seqs"]),
        ("treadle chat de", ["demo:treadle-demo"]),
        ("treadle bench serve --dataset-name s", ["sharegpt", "sonnet"]),
        ("treadle generate --attention-backend s", ["sdpa"]),
    ],
)
def test_tab(complete, line, words):
    assert complete(line) == words


def test_every_option_that_names_plugins_is_completed():
    kinds = set(PluginManager().keys("kinds")) | set(KINDS.values())
    assert set(KINDS.values()) <= kinds and all(plugin_keys(kind) for kind in KINDS.values())
    options = {name for group in ENGINE for name in group.names()}
    assert KINDS.keys() <= options and completer_of("max_num_seqs") is None


def test_models_of_the_cache(tmp_path, monkeypatch):
    for name in ("models--org--whole", "models--gpt2", "models--org--begun", "datasets--a--b"):
        (tmp_path / name / "snapshots" / "1").mkdir(parents=True)
        if "begun" not in name:
            (tmp_path / name / "snapshots" / "1" / "config.json").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert list(model_names()) == ["demo:treadle-demo", "gpt2", "org/whole"]


def test_tab_imports_nothing_heavy():
    """A shell waits for it."""
    code = (
        "import sys\nfrom treadle_cli.main import main\ntry:\n    main([])\n"
        "except SystemExit: pass\nprint(*({'torch', 'transformers', 'litestar', 'prompt_toolkit'} "
        "& set(sys.modules)), file=sys.stderr)"
    )
    line = {"COMP_WORDS": "treadle chat --url x --tool-call-parser ", "COMP_CWORD": "5"}
    environment = {**os.environ, "_TREADLE_COMPLETE": "complete_bash", **line}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert "hermes" in result.stdout and result.stderr == "\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell(shell, tmp_path):
    environment = {**os.environ, "_TREADLE_COMPLETE": f"source_{shell}", "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "treadle_cli"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert "_TREADLE_COMPLETE" in result.stdout and "treadle" in result.stdout
    assert list(Path(tmp_path).iterdir()) == []
