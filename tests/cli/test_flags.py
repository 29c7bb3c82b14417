"""Flags are made from the Structs, and their set is frozen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
import typer

from treadle.errors import ConfigError
from treadle_cli.flags import (
    BENCH,
    BENCH_SERVE,
    ENGINE,
    SAMPLING,
    Group,
    Options,
    server_group,
    with_flags,
)
from treadle_cli.flags.options import plugin_options
from treadle_cli.flags.types import decode_value, flag_type, holds_json, merge_plugin_options
from treadle_cli.help import single_command
from treadle_cli.main import app
from treadle_cli.rewrite import rewrite_flags

MORE = ("run", "batch", "ps", "pull", "list", "rm", "quantize")
FROZEN = Path(__file__).parent / "flags.txt"


def all_flags() -> Iterator[str]:
    """``command --flag`` for every flag of our own commands."""
    root = typer.main.get_command(app)
    for name in ("generate", "chat", "serve", "bench", "plugin", "doctor", "models", *MORE):
        _, command, _ = root.resolve_command(None, [name])
        leaves = getattr(command, "commands", None)
        for leaf, leaf_command in (leaves or {"": command}).items():
            path = f"{name} {leaf}".strip()
            for param in leaf_command.params:
                for flag in [*param.opts, *param.secondary_opts]:
                    if flag.startswith("-"):
                        yield f"{path} {flag}"


def test_the_set_of_flags_is_frozen():
    """A flag is a promise. Whoever adds or removes one edits flags.txt on purpose."""
    now, frozen = set(all_flags()), set(FROZEN.read_text().splitlines())
    added, removed = (
        "\n+ ".join(["", *sorted(now - frozen)]),
        "\n- ".join(["", *sorted(frozen - now)]),
    )
    assert now == frozen, f"flags.txt differs:{added}{removed}"


def test_the_file_is_sorted():
    lines = FROZEN.read_text().splitlines()
    assert lines == sorted(set(lines))


@pytest.mark.parametrize(
    "group", [*ENGINE, SAMPLING, BENCH, BENCH_SERVE, server_group()], ids=lambda g: g.section
)
def test_every_option_has_a_description(group):
    assert [f.name for f in group.fields() if not f.description] == []


@pytest.mark.parametrize(
    "groups",
    [(*ENGINE, SAMPLING), (*ENGINE, server_group()), (*ENGINE, BENCH)],
    ids=["generate", "serve", "bench"],
)
def test_no_option_occurs_twice_in_a_command(groups):
    names = [f.name for group in groups for f in group.fields()]
    assert len(names) == len(set(names))


def test_sampling_help_describes_only_what_exists():
    assert set(SAMPLING.help) == SAMPLING.names()


# -- from Struct to value ------------------------------------------------------------------


class Inner(msgspec.Struct):
    x: int = 1


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    number: Annotated[Annotated[int, msgspec.Meta(ge=1)] | None, msgspec.Meta(description="N.")] = (
        None
    )
    share: float = 0.5
    on: bool = True
    choice: Literal["a", "b"] = "a"
    names: list[str] = []
    stop: str | list[str] | None = None
    picks: list[Literal["x", "y"]] = []
    table: dict[str, int] = {}
    pairs: list[list[int]] = []
    inner: Inner | None = None
    either: str | dict[str, int] | None = None


GROUP = Group("sample", "Sample", Sample)


@pytest.fixture
def parse(monkeypatch, tmp_path):
    """Run a command with the flags of ``Sample`` and return its Struct."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Sample:
        samples: list[Sample] = []

        @with_flags(GROUP)
        def command(*, options: Options) -> None:
            samples.append(options.struct(GROUP))

        typer.main.get_command(single_command("x", command))(
            args=list(arguments), standalone_mode=False
        )
        return samples[0]

    return run


def test_nothing_given_is_the_default(parse):
    assert parse() == Sample()


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--number", "3"], "number", 3),
        (["--share", "1"], "share", 1.0),
        (["--no-on"], "on", False),
        (["--on"], "on", True),
        (["--choice", "b"], "choice", "b"),
        (["--names", "a", "--names", "b"], "names", ["a", "b"]),
        (["--stop", "x", "--stop", "y"], "stop", ["x", "y"]),
        (["--picks", "y"], "picks", ["y"]),
        (["--table", '{"a": 1}'], "table", {"a": 1}),
        (["--pairs", "[[1, 2]]"], "pairs", [[1, 2]]),
        (["--inner", '{"x": 5}'], "inner", Inner(5)),
        (["--either", '{"a": 1}'], "either", {"a": 1}),
        (["--either", '"text"'], "either", "text"),
    ],
    ids=str,
)
def test_a_flag_becomes_a_value(parse, arguments, field, value):
    assert getattr(parse(*arguments), field) == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--number", "0"], "option number is 0: Expected `int` >= 1"),
        (["--picks", "z"], r"option picks is \['z'\]: Invalid enum value 'z' \(allowed: x, y\)"),
        (["--table", "{"], "--table is '{', which is not JSON"),
        (["--table", '{"a": "b"}'], r"option table is \{'a': 'b'\}: Expected `int`, got `str`"),
    ],
)
def test_a_wrong_value_names_the_option(parse, arguments, message):
    with pytest.raises(ConfigError, match=message):
        parse(*arguments)


def test_types():
    assert flag_type(int | None) == int | None
    assert flag_type(str | list[str] | None) == list[str] | None
    assert holds_json(dict[str, int] | None) and holds_json(list[list[int]])
    assert not holds_json(list[str]) and not holds_json(Literal["a"])
    assert decode_value("n", int, 3) == 3


# -- the file ------------------------------------------------------------------------------


def test_a_file_lies_under_the_flags(parse, tmp_path):
    (tmp_path / "f.toml").write_text('number = 3\nshare = 0.25\nnames = ["a"]\n[table]\na = 1\n')
    options = parse("--config", "f.toml", "--share", "0.75", "--names", "b")
    assert (options.number, options.share, options.names, options.table) == (
        3,
        0.75,
        ["b"],
        {"a": 1},
    )


def test_dashes_are_underscores_and_other_sections_are_left_alone(treadle, tmp_path):
    (tmp_path / "f.toml").write_text(
        "max-num-seqs = 0\n[server]\nport = 1\n[bench]\nnum_iters = 1\n[sampling]\nseed = 1\n"
    )
    result = treadle("generate", "--prompt", "x", "--config", "f.toml")
    assert result == (2, "", "treadle: option max_num_seqs is 0: Expected `int` >= 1\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "max_num_seq = 1",
            "f.toml has max_num_seq, which is not an option of this command; did you mean 'max_num_seqs'?",
        ),
        (
            "[scheduler]\nmax_num_seq = 1",
            "f.toml has scheduler.max_num_seq, which is not an option",
        ),
        ("[server]\nprt = 1", "f.toml has server.prt, which is not an option"),
        ("port = 1", "f.toml has port, which is not an option of this command"),
        ("a = ", "--config f.toml is not TOML: "),
        ("temperature = 'hot'", "option temperature is 'hot': Expected `float`, got `str`"),
        ("max_num_seqs = '8'", "option max_num_seqs is '8': Expected `int"),
    ],
)
def test_a_wrong_file(treadle, tmp_path, text, message):
    (tmp_path / "f.toml").write_text(text)
    result = treadle("generate", "--prompt", "x", "--config", "f.toml")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"treadle: {message}") and result.err.count("\n") == 1


def test_a_file_may_use_the_name_of_another_engine(parse, tmp_path):
    (tmp_path / "f.toml").write_text("enable-auto-tool-choice = true\n[cache]\nblock-size = 16\n")
    from treadle_cli.flags.file import read_file

    assert read_file(tmp_path / "f.toml", {"page_size"}) == {"page_size": 16}


def test_a_missing_file(treadle):
    result = treadle("generate", "--prompt", "x", "--config", "nope.toml")
    assert result.code == 2 and result.err.startswith(
        "treadle: --config nope.toml cannot be read: "
    )


# -- options of plugins --------------------------------------------------------------------


def test_the_short_form_of_plugin_options():
    typed = [
        "generate",
        "--plugin.quantization.awq.bits=4",
        "--plugin.models.a.b.x",
        "1",
        "--pin-plugin",
        "p",
        "--",
        "--plugin.x",
    ]
    assert rewrite_flags(typed) == [
        "generate",
        "--plugin-option",
        "quantization.awq.bits=4",
        "--plugin-option",
        "models.a.b.x=1",
        "--pin-plugin",
        "p",
        "--",
        "--plugin.x",
    ]


def test_values_of_plugin_options():
    texts = ["quantization.awq.bits=4", "quantization.awq.group-size=x=y", "models.v1.5.on=true"]
    assert plugin_options(texts) == {
        "quantization:awq": {"bits": 4, "group_size": "x=y"},
        "models:v1.5": {"on": True},
    }


@pytest.mark.parametrize(
    "text", ["quantization.awq=4", "quantization.awq.bits", "awq=1", "quantisation.awq.bits=4"]
)
def test_a_wrong_plugin_option(text):
    with pytest.raises(ConfigError, match=r"--plugin\."):
        plugin_options([text])


def test_plugin_options_of_file_and_flags_are_merged(treadle, tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "import msgspec\nfrom treadle.api import impl\n"
        "TREADLE = {'executors': ['mine']}\n"
        "@impl\ndef treadle_executor(name, options):\n"
        "    from treadle.errors import ConfigError\n"
        "    raise ConfigError(f'got {sorted(options.items())}')\n"
    )
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "f.toml").write_text(
        '[plugins.plugin_options."executors:mine"]\na = 1\nb = 1\nc = 1\n'
    )
    result = treadle(
        *(
            "generate",
            str(tmp_path),
            "--prompt",
            "x",
            "--config",
            "f.toml",
            "--plugin-file",
            str(plugin),
        ),
        *(
            "--distributed-executor-backend",
            "mine",
            "--plugin-options",
            '{"executors:mine": {"b": 2, "c": 2}}',
        ),
        *("--plugin.executors.mine.c=3", "--plugin.executors.mine.d", "four"),
    )
    assert result.err == "treadle: got [('a', 1), ('b', 2), ('c', 3), ('d', 'four')]\n"


def test_plugin_options_of_a_wrong_shape():
    for table in ({"a": 1}, [1]):
        with pytest.raises(ConfigError, match="plugin_options is"):
            merge_plugin_options({}, table)
