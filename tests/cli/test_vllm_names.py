"""Every flag and variable of vLLM's own lists, typed at the real parser of ``treadle serve``."""

from __future__ import annotations

import logging
import tomllib
from typing import Any, Literal, get_args, get_origin

import pytest
from repository import ROOT
from typer.main import get_command

from treadle.config import EngineConfig, from_options, report_foreign_variables
from treadle.errors import ConfigError
from treadle.option_names import ENVIRONMENT, answers_to, describe_variables, option_names
from treadle_cli.commands.serve import treadle_command
from treadle_cli.flags import ENGINE, server_group
from treadle_cli.flags.types import holds_json, is_list, unwrap_annotated
from treadle_server.config import ServerConfig

LISTS: dict[str, dict[str, list[str]]] = tomllib.loads(
    (ROOT / "tests/cli/vllm_names.toml").read_text()
)
KINDS = ("values", "switches", "lists")
FLAGS = {flag: kind for names in LISTS.values() for kind in KINDS for flag in names[kind]}
FIELDS = {f.name: f for g in (*ENGINE, server_group()) for f in g.fields()}
VALUES = {"root_path": "/x", "model": "x", "host": "::1", "gpu_memory_utilization": "0.25"}
VALUES |= {"long_prefill_token_threshold": "64", "h11_max_incomplete_event_size": "4096"}
VALUES |= {
    "device": "cpu:1",
    "seed": "5",
    "dtype": "half",
    "kv_cache_dtype": "fp8",
    "uvicorn_log_level": "trace",
}
TOGETHER = {"ssl_keyfile": ["--ssl-certfile", "c"], "ssl_certfile": ["--ssl-keyfile", "k"]}
TOGETHER["ssl_ca_certs"] = ["--ssl-certfile", "c", "--ssl-keyfile", "k"]


def name_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def has_answer(flag: str) -> bool:
    row = answers_to().get(name_of(flag))
    return row is not None and bool(row.refusal or row.excuse)


ACCEPTED = [f for f in FLAGS if not has_answer(f) and f != "--config"]
REFUSED = [f for f in FLAGS if has_answer(f) and answers_to()[name_of(f)].refusal]
WITHOUT_EFFECT = [f for f in FLAGS if has_answer(f) and answers_to()[name_of(f)].excuse]


@pytest.fixture(scope="module")
def command() -> Any:
    """``treadle serve``, made once: each call parses its line anew."""
    return get_command(treadle_command("serve"))


@pytest.fixture
def served(command, monkeypatch):
    """``served(*flags)``: what the server would be started with. Raises what the command raises."""
    started: list[tuple[EngineConfig, ServerConfig]] = []
    monkeypatch.setattr("treadle_server.run.serve", lambda *configs: started.append(configs))

    def run(*flags: str) -> dict[str, Any]:
        started.clear()
        command.main(args=list(flags), prog_name="serve", standalone_mode=False)
        engine, server = started[0]
        parts = [getattr(engine, s) for s in engine.__struct_fields__]
        return {f: getattr(p, f) for p in (*parts, server) for f in p.__struct_fields__}

    return run


def sample(name: str) -> list[str]:
    """Two values of an option with several, else one that is not the default."""
    field = FIELDS[answers_to()[name].ours or name] if name in answers_to() else FIELDS[name]
    type_ = unwrap_annotated(field.annotation)
    if name in VALUES:
        return [VALUES[name]]
    if is_list(type_):
        return ["a", "b"]
    if holds_json(field.annotation):
        return ['{"a":1}']
    if get_origin(type_) is Literal:
        return [str(get_args(type_)[-1])]
    return {int: ["7"], float: ["7.5"], str: ["x"], bool: []}[type_]


def test_every_flag_has_an_answer() -> None:
    assert [f for f in FLAGS if name_of(f) not in FIELDS.keys() | answers_to().keys()] == []


@pytest.mark.parametrize("spelling", ["as it is", "underscores"])
def test_every_accepted_flag_reaches_its_option(spelling: str, served: Any) -> None:
    default = served("m")
    for flag in ACCEPTED:
        name = name_of(flag)
        row = answers_to().get(name)
        option = row.ours or name if row else name
        field, values = FIELDS[option], sample(name)
        typed = f"--no-{flag[2:]}" if field.default is True else flag
        typed = typed if spelling == "as it is" else "--" + name_of(typed)
        model = [] if option == "model" else ["m"]
        got = served(*model, typed, *values, *TOGETHER.get(name, []))
        changed = {f for f, value in got.items() if value != default[f]}
        others = {name_of(f) for f in TOGETHER.get(name, []) if f.startswith("-")}
        assert changed == {option} | others, flag
        if is_list(unwrap_annotated(field.annotation)):
            assert got[option] == values, flag


def test_every_flag_without_effect_takes_its_values_only(
    served: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expected = served("m", "--max-num-seqs", "7")
    for flag in WITHOUT_EFFECT:
        values = {"switches": [], "values": ["1"], "lists": ["1", "2"]}[FLAGS[flag]]
        caplog.clear()
        with caplog.at_level(logging.WARNING, "treadle.option_names"):
            assert served("m", flag, *values, "--max-num-seqs", "7") == expected, flag
        reason = answers_to()[name_of(flag)].excuse
        assert [r.getMessage() for r in caplog.records] == [f"{flag} has no effect: {reason}"]


def test_every_refused_flag_says_what_to_do(served: Any) -> None:
    for flag in REFUSED:
        value: Any = True if FLAGS[flag] == "switches" else "something"
        with pytest.raises(ConfigError) as raised:
            served("m", flag, *([] if value is True else [value]))
        assert str(raised.value) == f"{flag} is {value!r}: {answers_to()[name_of(flag)].refusal}"


def test_every_short_flag_is_known() -> None:
    known = {short for row in answers_to().values() for short in row.short}
    assert known == {short for names in LISTS.values() for short in names["short"]}


@pytest.mark.parametrize("version", ["0.8", "0.24"])
def test_the_version_of_a_row_is_where_the_name_is(version: str) -> None:
    names = {
        v.rpartition(".")[0]: {*map(name_of, (*s["values"], *s["switches"], *s["lists"]))}
        | {*s["llm"], *s["engine"]}
        for v, s in LISTS.items()
    }
    (other,) = names.keys() - {version}
    rows = answers_to()
    only = {n for n in names[version] - names[other] if n in rows}
    assert only == {n for n, row in rows.items() if row.version == version}


@pytest.mark.parametrize(
    ("typed", "option", "value"),
    [
        ("m --served-model-name a b", "served_model_name", ["a", "b"]),
        ("--model m --served-model-name a b", "served_model_name", ["a", "b"]),
        ("--served-model-name a b --model m", "served_model_name", ["a", "b"]),
        ("--served-model-name a m", "served_model_name", ["a"]),
        ("--served-model-name a m", "model", "m"),
        ("--model=m", "model", "m"),
        ("--tensor_parallel_size=2", "tensor_parallel_size", 2),
        ("-tp 2", "tensor_parallel_size", 2),
        ("-tp=2", "tensor_parallel_size", 2),
        ("-q awq", "quantization", "awq"),
        ("--max-model-len 32k", "max_model_len", 32_000),
        ("--max-model-len=1M", "max_model_len", 2**20),
        ("--max-model-len -1", "max_model_len", None),
        ("--no-enable-prefix-caching", "enable_prefix_caching", False),
        ("--no_enable_prefix_caching", "enable_prefix_caching", False),
        ("--enable-prefix-caching", "enable_prefix_caching", True),
        ("--no-enable-chunked-prefill --port 9", "port", 9),
        ("-O3 --port 9", "port", 9),
        ("-O 3 --port 9", "port", 9),
        ("-O.level=3 --port 9", "port", 9),
        ("-cc.mode 3 --port 9", "port", 9),
        ("--enable-auto-tool-choice --tool-call-parser hermes", "tool_call_parser", "hermes"),
        (
            "--hf-overrides.rope.factor 2.5 --hf_overrides.a b",
            "hf_overrides",
            {"rope": {"factor": 2.5}, "a": "b"},
        ),
        ('--allowed-origins ["*"]', "allowed_origins", ["*"]),
        (
            "--structured-outputs-config.backend guidance",
            "structured_output_backends",
            ["guidance"],
        ),
        (
            '--structured-outputs-config {"backend":"guidance"}',
            "structured_output_backends",
            ["guidance"],
        ),
        ("-pp 1 --data-parallel-size 1 --port 9", "port", 9),
        ("--api-key -tp", "api_key", ["-tp"]),
        ("-- m", "model", "m"),
    ],
)
def test_habits(typed: str, option: str, value: Any, served: Any) -> None:
    assert served(*typed.split())[option] == value


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("-pp 2", "--pipeline-parallel-size is 2: not built yet: pipeline"),
        ("-dp 2", "--data-parallel-size is 2: use several servers"),
        (
            "--speculative-config.method ngram",
            "--speculative-config is {'method': 'ngram'}: not built",
        ),
        ("-sc.method=ngram", "--speculative-config is {'method': 'ngram'}: not built"),
        ("--enable-lora", "--enable-lora is True: not built yet: adapters"),
    ],
)
def test_habits_that_are_refused(typed: str, message: str, served: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        served("m", *typed.split())
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--max-model-lenn 3", "No such option: --max-model-lenn"),
        ("--tensor-parallel-size", "requires an argument"),
    ],
)
def test_what_the_parser_itself_refuses(typed: str, message: str, treadle: Any) -> None:
    result = treadle("serve", "m", *typed.split())
    assert result.code == 2 and message in result.err


@pytest.mark.parametrize("command", ["generate", "chat", "bench throughput", "bench latency"])
def test_other_commands_answer_too(command: str, treadle: Any) -> None:
    result = treadle(*command.split(), "m", "--max_model_len", "1k", "--enable-lora")
    assert (result.code, "--enable-lora is True: not built" in result.err) == (2, True)


def test_a_yaml_file(served: Any, tmp_path: Any) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: m\nhost: 127.0.0.1\nport: 6398\nuvicorn-log-level: info\nmax-model-len: 32k\n"
        "dtype: half\nserved-model-name: [a, b]\nenable-chunked-prefill: true\n"
        "enable-prefix-caching: false\napi-key:\nhf-overrides: {rope: {factor: 2}}\n"
    )
    got = served("--config", str(file), "--port", "9")
    assert (got["model"], got["port"], got["max_model_len"], got["dtype"]) == (
        "m",
        9,
        32_000,
        "float16",
    )
    assert (got["served_model_name"], got["enable_prefix_caching"]) == (["a", "b"], False)
    assert got["hf_overrides"] == {"rope": {"factor": 2}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("enable-lora: true", "option enable_lora is True: not built yet"),
        ("a: [", "is not YAML"),
        ("- a", "is not a YAML mapping"),
        ("1: 2", "is not a YAML mapping"),
        ("!!python/object/apply:os.system ['x']", "is not YAML"),
        ("max-num-seqss: 3", "did you mean 'max_num_seqs'"),
    ],
)
def test_a_yaml_file_that_is_wrong(text: str, message: str, served: Any, tmp_path: Any) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        served("m", "--config", str(tmp_path / "c.yaml"))
    assert message in str(raised.value)


def test_every_variable_has_an_answer_and_every_answer_a_variable() -> None:
    variables = sorted({v for names in LISTS.values() for v in names["environment"]})
    for variable in variables:
        assert "not a name of vLLM" not in (describe_variables([variable]) or "")
    for pattern in option_names()[ENVIRONMENT]:
        assert any(v.startswith(pattern.rstrip("*")) for v in variables), pattern
    assert "not a name of vLLM" in (describe_variables(["VLLM_NO_SUCH_THING"]) or "")


def test_variables_of_vllm_are_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "treadle.config"):
        report_foreign_variables()
        assert caplog.records == []
        monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASHINFER")
        monkeypatch.setenv("VLLM_USE_V1", "1")
        monkeypatch.setenv("CUDA_HOME", "/x")
        report_foreign_variables()
    (record,) = caplog.records
    assert record.getMessage() == (
        "treadle does not read VLLM_ATTENTION_BACKEND (use attention_backend); VLLM_USE_V1 (there is "
        "one engine: inside the process of `LLM`, in a child of the server)"
    )


def test_the_defaults_are_not_touched() -> None:
    assert from_options({}) == EngineConfig()


@pytest.mark.parametrize(
    ("given", "backends"),
    [
        (["--structured-outputs-config", '{"backend": "guidance"}'], ("guidance",)),
        (["--structured-outputs-config.backend", "xgrammar"], ("xgrammar",)),
        (["--guided-decoding-backend", "outlines:no-fallback"], ("outlines",)),
        (["--grammar-backend", "llguidance"], ("llguidance",)),
        (["--grammar-backend", "none"], ()),
    ],
)
def test_backends_of_structured_output_have_the_names_of_other_engines(
    given: list[str], backends: tuple[str, ...], served: Any
) -> None:
    assert tuple(served("m", *given)["structured_output_backends"] or ()) == backends


@pytest.mark.parametrize("name", ["disable_any_whitespace", "disable_additional_properties"])
def test_what_only_a_request_can_ask_of_a_schema(name: str, served: Any) -> None:
    with pytest.raises(ConfigError, match=f"use the field `{name}` of a request"):
        served("m", "--structured-outputs-config", f'{{"{name}": true}}')
