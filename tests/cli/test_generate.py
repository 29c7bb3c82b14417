"""``treadle generate`` with a real engine and a tiny random model."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

SMALL = ("--kv-cache-memory-bytes", "10000000", "--cpu-threads", "1")
GREEDY = (*SMALL, "--temperature", "0")


@pytest.fixture
def expected(checkpoint):
    """What the library says to ``Hello`` in 12 greedy tokens."""
    from treadle import LLM, SamplingParams

    with LLM(model=checkpoint, kv_cache_memory_bytes=10_000_000, cpu_threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        return llm.generate("Hello", params, use_tqdm=False)[0].outputs[0]


def test_a_flag_and_a_pipe_give_what_the_library_gives(treadle, checkpoint, expected):
    arguments = ("generate", checkpoint, *GREEDY, "--max-tokens", "12")
    flag = treadle(*arguments, "--prompt", "Hello", "--stats")
    assert flag.code == 0 and flag.out == expected.text + "\n"
    assert flag.err.startswith("12 tokens, ") and "ended by length" in flag.err
    assert treadle(*arguments, stdin="Hello") == (0, expected.text + "\n", "")


def test_a_flag_of_another_engine(treadle, checkpoint, expected, caplog):
    result = treadle(
        *("generate", checkpoint, *GREEDY, "--max-tokens", "12", "--prompt", "Hello"),
        *("--block-size", "16"),
    )
    assert (result.code, result.out) == (0, expected.text + "\n")
    assert "--block-size is accepted; its name in treadle is --page-size" in caplog.messages
    error = treadle("generate", checkpoint, "--prompt", "Hello", "--block-size", "0")
    assert error.code == 2 and error.err.startswith("treadle: option page_size is 0: ")


def test_json(treadle, checkpoint, expected):
    result = treadle(
        *("generate", checkpoint, *GREEDY, "--max-tokens", "12", "--json", "--logprobs", "1"),
        *("--prompt", "Hello", "--prompt", "Bye"),
    )
    first, second = (json.loads(line) for line in result.out.splitlines())
    assert first["outputs"][0]["token_ids"] == expected.token_ids
    assert len(first["outputs"][0]["logprobs"]) == 12
    assert second["prompt"] == "Bye"


def test_json_is_printed_when_it_is_there(treadle, checkpoint, monkeypatch):
    """Whoever reads the first line gets it before the second prompt has begun."""
    from treadle import LLM

    steps = []

    class Reader(io.StringIO):
        def write(self, text):
            raise KeyboardInterrupt

    shutdown = LLM.shutdown
    monkeypatch.setattr(
        LLM, "shutdown", lambda llm: (steps.append(llm.stats.num_steps), shutdown(llm))
    )
    monkeypatch.setattr("sys.stdout", Reader())
    arguments = ("--max-num-seqs", "1", "--max-tokens", "20", "--ignore-eos", "--json")
    assert treadle("generate", checkpoint, *GREEDY, *arguments, "-p", "a", "-p", "b").code == 130
    assert 20 <= steps[0] < 30, "40 are both"


def test_several_outputs(treadle, checkpoint):
    result = treadle(
        *("generate", checkpoint, *SMALL, "--max-tokens", "4", "--n", "2", "--seed", "1"),
        *("--prompt", "a", "--prompt", "b"),
    )
    assert [line for line in result.out.splitlines() if line.startswith("==> ")] == [
        f"==> {i}/4 <==" for i in (1, 2, 3, 4)
    ]


def test_the_checkpoint_recommends_and_flags_decide(treadle, checkpoint, tmp_path):
    """Greedy by recommendation gives one text; a high temperature from a flag another."""
    arguments = ("generate", checkpoint, *SMALL, "--prompt", "Hello", "--max-tokens", "12")
    recommended = ("--override-generation-config", '{"temperature": 0}')
    greedy = treadle(*arguments, "--temperature", "0")
    assert treadle(*arguments, *recommended) == greedy
    assert treadle(*arguments, *recommended, "--temperature", "50") != greedy


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--max-num-seqs", "0"), 2, "option max_num_seqs is 0: Expected `int` >= 1"),
        (("--temperature", "200"), 2, "temperature is 200.0; it must be in [0.0, 100.0]"),
        (
            ("--structured-outputs", '{"regex": 1}'),
            2,
            "option structured_outputs is {'regex': 1}: Expected `str | null`",
        ),
        (("--pin-plugin", "awq"), 2, "--pin-plugin is 'awq'; write kind:key=distribution"),
        (
            ("--distributed-executor-backend", "nobody"),
            2,
            "--distributed-executor-backend is 'nobody': no plugin provides executors:nobody "
            "(known: mp, ray, uni",
        ),
        (("--plugin-file", "nope.py"), 2, "--plugin-file nope.py cannot be read: No such file"),
    ],
    ids=lambda v: v[0] if isinstance(v, tuple) else "",
)
def test_an_error_is_one_line(treadle, checkpoint, arguments, code, message):
    result = treadle("generate", checkpoint, "--prompt", "x", *arguments)
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith(f"treadle: {message}") and result.err.count("\n") == 1


def test_a_model_that_is_not_there(treadle):
    result = treadle("generate", "./nowhere", "--prompt", "x")
    assert result.code == 1 and result.err.startswith("treadle: ") and "nowhere" in result.err


def test_a_prompt_that_is_too_long(treadle, checkpoint):
    result = treadle("generate", checkpoint, *SMALL, "--max-model-len", "16", "--prompt", "x" * 50)
    assert result.code == 2 and "50" in result.err and result.err.count("\n") == 1


def test_an_empty_pipe(treadle):
    assert treadle("generate") == (
        2,
        "",
        "treadle: standard input is empty; give --prompt TEXT or pipe text to it\n",
    )


def test_debug_shows_the_traceback(treadle, monkeypatch):
    from treadle.errors import ConfigError

    monkeypatch.setenv("TREADLE_DEBUG", "1")
    with pytest.raises(ConfigError, match="standard input is empty"):
        treadle("generate")


def test_a_reader_that_leaves_is_no_error():
    """``treadle plugin list | head -1``"""
    command = f"{sys.executable} -m treadle_cli plugin list --json"
    code = "import sys; sys.stdin.read(1)"
    shell = f"set -o pipefail; {command} | {sys.executable} -c '{code}'"
    process = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert "Traceback" not in process.stderr and "BrokenPipe" not in process.stderr
