"""Names of other engines for options, as arguments: accepted, without effect, or refused by name."""

from __future__ import annotations

import logging
import tomllib
from typing import Any

import pytest
from repository import ROOT

from treadle import LLM
from treadle.config import EngineConfig, config_sections, from_options
from treadle.errors import ConfigError
from treadle.option_names import answers_to
from treadle_server.config import ServerConfig

OPTIONS = {name for _, section in config_sections() for name in section.__struct_fields__}
SERVER_OPTIONS = set(ServerConfig.__struct_fields__)
VLLM: dict[str, dict[str, list[str]]] = tomllib.loads(
    (ROOT / "tests/cli/vllm_names.toml").read_text()
)
ARGUMENTS = sorted({name for names in VLLM.values() for name in (*names["llm"], *names["engine"])})
REFUSED = [n for n in ARGUMENTS if (row := answers_to().get(n)) and row.refusal]
WITHOUT_EFFECT = [n for n in ARGUMENTS if (row := answers_to().get(n)) and row.excuse]
ALIASES = {n: row.ours for n, row in answers_to().items() if row.ours in OPTIONS}
VALUES: dict[str, Any] = {
    "structured_output_backends": ["outlines"],
    "plugin_file": ["p.py"],
    "gpu_memory_utilization": 0.5,
    "model": "org/name",
}


def value_of(config: EngineConfig, option: str) -> Any:
    sections = (getattr(config, name) for name, _ in config_sections())
    return next(getattr(s, option) for s in sections if option in s.__struct_fields__)


def test_every_argument_of_vllm_is_an_option_or_has_an_answer() -> None:
    rows = answers_to()
    assert [n for n in ARGUMENTS if n not in OPTIONS | rows.keys()] == []
    answered = {n for n in ARGUMENTS if n in rows and (rows[n].refusal or rows[n].excuse)}
    assert not answered & OPTIONS


def test_an_argument_that_is_refused_says_what_to_do() -> None:
    for name in REFUSED:
        row = answers_to()[name]
        with pytest.raises(ConfigError) as raised:
            from_options({name: "something"})
        assert str(raised.value) == f"option {name} is 'something': {row.refusal}"
        for nothing in (None, False, 0, "", [], {}, *row.neutral):
            assert from_options({name: nothing}) == from_options()


def test_llm_refuses_before_it_reads_a_model() -> None:
    with pytest.raises(ConfigError, match="option enable_lora is True: not built yet: adapters"):
        LLM("no/model", enable_lora=True)


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_an_argument_without_effect_says_why(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "treadle.option_names"):
        assert from_options({name: True}) == from_options()
    assert [r.getMessage() for r in caplog.records] == [
        f"option {name} has no effect: {answers_to()[name].excuse}"
    ]


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_sets_the_option_and_gives_its_name(
    alias: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    value = VALUES.get(name, 32)
    with caplog.at_level(logging.WARNING, "treadle.option_names"):
        config = from_options({alias: value})
    assert config == from_options({name: value}) != from_options()
    assert value_of(config, name) == value
    assert [record.getMessage() for record in caplog.records] == [
        f"option {alias} is accepted; its name in treadle is {name}"
    ]
    with pytest.raises(ConfigError, match=f"{alias} is another name of {name}; give only {name}"):
        from_options({alias: value, name: value})


@pytest.mark.parametrize(
    ("given", "option", "value"),
    [
        ({"dtype": "half"}, "dtype", "float16"),
        ({"dtype": "float"}, "dtype", "float32"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype", "fp8_e4m3"),
        ({"max_model_len": "32k"}, "max_model_len", 32_000),
        ({"max_model_len": "32K"}, "max_model_len", 32_768),
        ({"max_model_len": "1M"}, "max_model_len", 2**20),
        ({"max_model_len": "25.6k"}, "max_model_len", 25_600),
        ({"max_model_len": "auto"}, "max_model_len", None),
        ({"max_model_len": -1}, "max_model_len", None),
        ({"kv_cache_memory_bytes": "2G"}, "kv_cache_memory_bytes", 2**31),
        ({"served_model_name": "a"}, "served_model_name", ["a"]),
        ({"served_model_name": ["a", "b"]}, "served_model_name", ["a", "b"]),
        ({"generation_config": "vllm"}, "generation_config", "treadle"),
        ({"long_prefill_token_threshold": 0}, "chunked_prefill_size", None),
        ({"guided_decoding_backend": "auto"}, "structured_output_backends", []),
        (
            {"structured_outputs_config": {"backend": "outlines"}},
            "structured_output_backends",
            ["outlines"],
        ),
    ],
)
def test_values_in_the_spelling_of_vllm(given: dict[str, Any], option: str, value: Any) -> None:
    assert value_of(from_options(given), option) == value


def test_a_table_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"treadle has no option 'structured_outputs_config\.x'"):
        from_options(structured_outputs_config={"backend": "outlines", "x": 1})


def test_an_alias_without_a_value_keeps_the_default(caplog: pytest.LogCaptureFixture) -> None:
    assert from_options(block_size=None, page_size=64).cache.page_size == 64
    assert caplog.records == []


def test_a_wrong_value_is_reported_under_treadles_name() -> None:
    with pytest.raises(ConfigError, match=r"option page_size is 0: Expected `int` >= 1"):
        from_options(block_size=0)
    with pytest.raises(ConfigError, match=r"option max_model_len is '3x'"):
        from_options(max_model_len="3x")


def test_each_row_of_the_table_leads_to_an_option_or_has_one_answer() -> None:
    for name, row in answers_to().items():
        answers = [a for a in (row.ours, row.always, row.harmless, row.use, row.missing) if a]
        if name in OPTIONS | SERVER_OPTIONS | {"config"}:
            assert answers == [], name
        else:
            assert len(answers) == 1, name
            assert row.ours is None or row.ours in OPTIONS | SERVER_OPTIONS, name
