"""Every hook, called as treadle calls it, with every argument of its specification."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from litestar.config.app import AppConfig
from repository import hooks

from treadle.api import kinds
from treadle.api import types as t
from treadle.api.hookspecs import AllResultsHooks, FirstResultHooks
from treadle.api.kinds import (
    EXECUTORS,
    LOAD_FORMATS,
    LOGITS_PROCESSORS,
    MODEL_SOURCES,
    MODELS,
    QUANTIZATION,
    REASONING_PARSERS,
    RENDERERS,
    SCHEDULING_POLICIES,
    STAT_LOGGERS,
    STRUCTURED_OUTPUT,
    TOKENIZERS,
    TOOL_PARSERS,
)
from treadle.config import EngineConfig, PluginConfig
from treadle.engine.extensions import ConfiguredExtensions
from treadle.errors import PluginLoadError
from treadle.loading import matching
from treadle.plugins import PluginManager, installed_kinds
from treadle.testing.introspection import report
from treadle_cli.hookspecs import COMMANDS, CommandHooks
from treadle_server.app import create_app
from treadle_server.config import ServerConfig
from treadle_server.context import ServerContext
from treadle_server.hookspecs import ServerHooks
from treadle_server.testing.engine import FakeEngine

CONFIG = EngineConfig()
FILES = t.ModelFiles(Path("nowhere"), (), {})
TOKENIZER: Any = object()
DEVICE = t.DeviceInfo("cpu")
TRAITS = t.ModelTraits()

ATTENTION = t.AttentionRequest(DEVICE, "float32", "float32", 64, 8, 8, 0.125)
KERNEL = t.KernelRequest(DEVICE, "float32", {"size": 8})

COMMUNICATOR = t.CommunicatorRequest(DEVICE, 2)

Call = Callable[[PluginManager], Any]

SPECIFICATIONS = (FirstResultHooks, AllResultsHooks, ServerHooks, CommandHooks)


def configured(plugins: PluginManager) -> None:
    ConfiguredExtensions(plugins, CONFIG).unconfigure()


def served(plugins: PluginManager) -> None:
    """As a server builds its application."""
    create_app(ServerContext(FakeEngine(plugins, "parrot"), ServerConfig()))


def run(plugins: PluginManager) -> Any:
    """As the command ``treadle`` asks for a subcommand."""
    return plugins.create(COMMANDS, "key")


# hook -> the call of the plugin manager that leads to it, and the arguments that must arrive
CALLS: dict[str, tuple[Call, dict[str, object]]] = {
    "treadle_model_source": (lambda h: h.create(MODEL_SOURCES, "key"), {"scheme": "key"}),
    "treadle_load_format": (
        lambda h: h.create(LOAD_FORMATS, "key", files=FILES, seed=7),
        {"format": "key", "files": FILES, "seed": 7},
    ),
    "treadle_tokenizer": (
        lambda h: h.create(TOKENIZERS, "key", files=FILES),
        {"mode": "key", "files": FILES},
    ),
    "treadle_renderer": (
        lambda h: h.create(RENDERERS, "key", files=FILES, tokenizer=TOKENIZER),
        {"mode": "key", "files": FILES, "tokenizer": TOKENIZER},
    ),
    "treadle_model": (
        lambda h: h.create(MODELS, "key", hf_config=CONFIG),
        {"architecture": "key", "hf_config": CONFIG},
    ),
    "treadle_model_config": (
        lambda h: h.hooks_for("models", "key").treadle_model_config(
            architecture="key", config={"model_type": "x"}, options=h.options("models", "key")
        ),
        {"architecture": "key", "config": {"model_type": "x"}},
    ),
    "treadle_quantization": (
        lambda h: h.create(QUANTIZATION, "key", checkpoint={"bits": 4}, device=DEVICE),
        {"method": "key", "checkpoint": {"bits": 4}, "device": DEVICE},
    ),
    "treadle_executor": (
        lambda h: h.create(EXECUTORS, "key", config=CONFIG, plugins=h),
        {"name": "key", "config": CONFIG},
    ),
    "treadle_scheduling_policy": (lambda h: h.create(SCHEDULING_POLICIES, "key"), {"name": "key"}),
    "treadle_logits_processor": (
        lambda h: [h.create(LOGITS_PROCESSORS, "key", vocab_size=99)][0],
        {"name": "key", "vocab_size": 99},
    ),
    "treadle_stat_logger": (lambda h: [h.create(STAT_LOGGERS, "key")][0], {"name": "key"}),
    "treadle_match": (
        lambda h: matching.candidates(h, kinds.TOOL_PARSERS, TRAITS),
        {"kind": "tool_parsers", "key": "key", "model": TRAITS},
    ),
    "treadle_grammar_compiler": (
        lambda h: h.create(STRUCTURED_OUTPUT, "key", tokenizer=TOKENIZER, vocab_size=99),
        {"name": "key", "tokenizer": TOKENIZER, "vocab_size": 99},
    ),
    "treadle_tool_parser": (
        lambda h: h.create(TOOL_PARSERS, "key", tokenizer=TOKENIZER, tools=[]),
        {"name": "key", "tokenizer": TOKENIZER, "tools": []},
    ),
    "treadle_reasoning_parser": (
        lambda h: h.create(REASONING_PARSERS, "key", tokenizer=TOKENIZER, prompt="<think>"),
        {"name": "key", "tokenizer": TOKENIZER, "prompt": "<think>"},
    ),
    "treadle_attention_backend": (
        lambda h: h.offers(kinds.ATTENTION_BACKENDS, request=ATTENTION),
        {"request": ATTENTION},
    ),
    "treadle_kernel_op": (
        lambda h: h.offers(kinds.KERNEL_OPS, op="rms_norm", request=KERNEL),
        {"op": "rms_norm", "request": KERNEL},
    ),
    "treadle_communicator": (
        lambda h: h.offers(kinds.COMMUNICATORS, request=COMMUNICATOR),
        {"request": COMMUNICATOR},
    ),
    "treadle_configure": (configured, {"config": CONFIG}),
    "treadle_unconfigure": (configured, {}),
    "treadle_report": (lambda h: report(h), {}),
    "treadle_server": (served, {}),
    "treadle_command": (run, {"name": "key"}),
}

IMPLEMENTATION = """
@impl
def {hook}({arguments}):
    RECEIVED[{hook!r}] = dict({pairs})
    return {answer}
"""


def specifications() -> dict[str, Callable[..., Any]]:
    return {
        name: function
        for specs in SPECIFICATIONS
        for name, function in vars(specs).items()
        if name.startswith("treadle_")
    }


def arguments(hook: str) -> list[str]:
    return [name for name in inspect.signature(specifications()[hook]).parameters if name != "self"]


@pytest.fixture
def plugins(tmp_path: Path) -> PluginManager:
    """A plugin manager with one plugin that owns ``key`` in every kind and says how it was called."""
    declared = {kind: ["key"] for kind in installed_kinds()}
    text = f"from treadle.api import impl\nTREADLE = {declared!r}\nRECEIVED = {{}}\n"
    for hook in CALLS:
        names = arguments(hook)
        pairs = ", ".join(f"{name}={name}" for name in names)
        answer = repr(hook) if hasattr(FirstResultHooks, hook) and hook != "treadle_match" else None
        text += IMPLEMENTATION.format(
            hook=hook, arguments=", ".join(names), pairs=pairs, answer=answer
        )
    file = tmp_path / "every_hook.py"
    file.write_text(text)
    colours = {f"{kind}:key": {"colour": kind} for kind in installed_kinds()}
    return PluginManager(PluginConfig(plugin_file=[str(file)], plugin_options=colours), source=list)


@pytest.mark.parametrize("hook", CALLS)
def test_a_hook_receives_every_argument(hook: str, plugins: PluginManager) -> None:
    call, expected = CALLS[hook]
    plugin: Any = plugins.load("extensions", "key")
    if hook == "treadle_command":
        with pytest.raises(PluginLoadError, match="returned None"):
            call(plugins)
    else:
        answer = call(plugins)
        assert not hasattr(FirstResultHooks, hook) or hook == "treadle_match" or answer == hook
    received = plugin.RECEIVED[hook]
    assert set(received) == set(arguments(hook))
    assert {name: received[name] for name in expected} == expected
    kinds = [name for name, kind in installed_kinds().items() if kind.hook == hook]
    kinds = kinds or ["models" if hook == "treadle_model_config" else "tool_parsers"]
    assert received.get("options", {"colour": kinds[0]}) == {"colour": kinds[0]}
    assert received.get("plugins", plugins) is plugins
    assert isinstance(received.get("app", AppConfig()), AppConfig)
    assert received.get("engine", FakeEngine) is FakeEngine or isinstance(
        received["engine"], FakeEngine
    )


def test_all_hooks_are_called_here() -> None:
    assert set(specifications()) == set(CALLS)


def test_the_specifications_are_all_there_are() -> None:
    """A distribution that adds hooks of its own adds them here."""
    assert {hook.name for hook in hooks()} == set(specifications())
