"""Names of other engines for options: accepted, without effect, or answered with treadle's."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from treadle.config import (
    IGNORED_OPTIONS,
    OPTION_ALIASES,
    RELATED_OPTIONS,
    EngineConfig,
    config_sections,
    from_options,
)
from treadle.errors import ConfigError

OPTIONS = {name for _, section in config_sections() for name in section.__struct_fields__}
VALUES: dict[str, Any] = {
    "block_size": 32,
    "num_gpu_blocks_override": 100,
    "mem_fraction_static": 0.5,
    "max_queued_requests": 7,
    "context_length": 512,
    "structured_outputs_config.backend": ["outlines"],
}


def value_of(config: EngineConfig, option: str) -> Any:
    sections = (getattr(config, name) for name, _ in config_sections())
    return next(getattr(s, option) for s in sections if option in s.__struct_fields__)


@pytest.mark.parametrize(("alias", "name"), OPTION_ALIASES.items())
def test_an_alias_sets_the_option_and_gives_its_name(
    alias: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "treadle.config"):
        config = from_options({alias: VALUES[alias]})
    assert config == from_options({name: VALUES[alias]})
    assert value_of(config, name) == VALUES[alias]
    assert [record.getMessage() for record in caplog.records] == [
        f"option {alias} is accepted; its name in treadle is {name}"
    ]


@pytest.mark.parametrize(("alias", "name"), OPTION_ALIASES.items())
def test_both_names_at_once_are_an_error(alias: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{alias} is another name of {name}; give only {name}"):
        from_options({alias: VALUES[alias], name: VALUES[alias]})


def test_an_alias_without_a_value_keeps_the_default(caplog: pytest.LogCaptureFixture) -> None:
    assert from_options(block_size=None, page_size=64).cache.page_size == 64
    assert caplog.records == []


def test_a_wrong_value_is_reported_under_treadles_name() -> None:
    with pytest.raises(ConfigError, match=r"option page_size is 0: Expected `int` >= 1"):
        from_options(block_size=0)


@pytest.mark.parametrize(("name", "reason"), IGNORED_OPTIONS.items())
def test_an_option_without_effect_says_why(
    name: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "treadle.config"):
        assert from_options({name: True}) == from_options()
    assert [r.getMessage() for r in caplog.records] == [f"option {name} has no effect: {reason}"]


@pytest.mark.parametrize(("name", "related"), RELATED_OPTIONS.items())
def test_an_option_of_another_kind_names_the_nearest_one(name: str, related: str) -> None:
    with pytest.raises(ConfigError, match=f"treadle has no option '{name}'; see '{related}'"):
        from_options({name: "1"})


def test_names_of_other_engines_lead_to_options_and_are_none() -> None:
    names = [*OPTION_ALIASES, *IGNORED_OPTIONS, *RELATED_OPTIONS]
    assert len(set(names)) == len(names) and not OPTIONS & set(names)
    assert {*OPTION_ALIASES.values(), *RELATED_OPTIONS.values()} <= OPTIONS
