"""Every option that names a plugin is checked before anything of a model is read."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from treadle import LLM
from treadle.api.kinds import CORE_KINDS
from treadle.config import EngineConfig, config_sections
from treadle.entrypoints.async_llm import AsyncLLM
from treadle.errors import ConfigError, PluginNotFoundError
from treadle.plugins import PluginManager
from treadle_cli.main import main

NAMED = {
    kind.option.removeprefix("--").replace("-", "_"): kind for kind in CORE_KINDS if kind.option
}
NOT_NAMED = {
    "communicators": "the best offer is used",
    "extensions": "all are called",
    "kernel_ops": "the best offer is used",
    "model_sources": "the scheme of the model names it, and nothing is read without it",
    "models": "the checkpoint names it",
}
FREE_TEXTS = {
    "chat_template",
    "device",
    "disable_plugin",
    "download_dir",
    "generation_config",
    "isolate",
    "model",
    "pin_plugin",
    "plugin_file",
    "plugin_lock_file",
    "revision",
    "served_model_name",
    "tokenizer",
    "tokenizer_revision",
}
NOWHERE = "/nowhere/at/all"
OPTIONS = pytest.mark.parametrize("option", sorted(NAMED))


def is_text(annotation: Any) -> bool:
    """Whether a text without fixed choices, or a list of them, is a value."""
    if get_origin(annotation) is Literal:
        return False
    arguments = [a for a in get_args(annotation) if a is not type(None)]
    return annotation is str or (
        get_origin(annotation) is not dict and any(map(is_text, arguments))
    )


def misspelt(option: str) -> tuple[str, str]:
    """Return a key of the option's kind, and what is nearly that."""
    key = max(PluginManager().keys(NAMED[option].name), key=len)
    return key, f"{key}x"


def check(message: str, option: str) -> None:
    key, wrong = misspelt(option)
    assert message.startswith(f"{NAMED[option].option} is {wrong!r}: "), message
    assert f"did you mean {key!r}?" in message and "known: " in message, message


def test_every_kind_has_an_option_or_a_reason() -> None:
    assert {kind.name for kind in CORE_KINDS if not kind.option} == set(NOT_NAMED)


def test_every_text_is_a_name_that_is_checked_or_is_free() -> None:
    texts = {
        field
        for _, section in config_sections(EngineConfig)
        for field, annotation in get_type_hints(section).items()
        if is_text(annotation)
    }
    assert texts == FREE_TEXTS | NAMED.keys()


@OPTIONS
@pytest.mark.parametrize("engine", [LLM, AsyncLLM])
def test_an_engine_refuses_it_before_it_looks_for_the_model(engine: Any, option: str) -> None:
    _, wrong = misspelt(option)
    value = [wrong] if option.endswith("s") else wrong
    with pytest.raises(PluginNotFoundError) as caught:
        engine(NOWHERE, **{option: value})
    check(str(caught.value), option)


@OPTIONS
def test_a_command_refuses_it_before_it_looks_for_the_model(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, wrong = misspelt(option)
    with pytest.raises(SystemExit) as caught:
        main(["generate", NOWHERE, "-p", "hi", NAMED[option].option, wrong])
    assert caught.value.code
    check(capsys.readouterr().err.removeprefix("treadle: "), option)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu0", ""])
def test_a_device_is_checked_without_torch(device: str) -> None:
    with pytest.raises(ConfigError, match=f"option device is {device!r}.*auto.*cpu.*cuda"):
        AsyncLLM(NOWHERE, device=device)


def test_a_folder_has_no_revisions(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("revision", "tokenizer-revision"):
        with pytest.raises(SystemExit):
            main(["generate", str(tmp_path), "-p", "hi", f"--{option}", "main"])
        error = capsys.readouterr().err
        assert "'main'" in error and "is a folder" in error and "leave it out" in error
