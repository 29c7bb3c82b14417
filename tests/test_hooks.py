"""Every hook, called as treadle calls it, with every argument of its specification."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from litestar.config.app import AppConfig
from repository import hooks

from treadle.api import types as t
from treadle.api.hookspecs import Every, First
from treadle.config import EngineConfig, PluginConfig
from treadle.errors import PluginLoadError
from treadle.plugins import KINDS, Host
from treadle_cli.hookspecs import CommandHooks
from treadle_server.app import create_app
from treadle_server.config import ServerConfig
from treadle_server.context import ServerContext
from treadle_server.hookspecs import ServerHooks
from treadle_server.testing.engine import Parrot

CONFIG = EngineConfig()
FILES = t.ModelFiles(Path("nowhere"), (), {})
TOKENIZER: Any = object()
LAYOUT = t.CacheLayout(16, 8, ())
DEVICE = t.DeviceInfo("cpu")
TRAITS = t.ModelTraits()

ATTENTION = t.AttentionRequest(DEVICE, "float32", "float32", 64, 8, 8, 0.125)
KERNEL = t.KernelRequest(DEVICE, "float32", {"size": 8})

Call = Callable[[Host], Any]

SPECIFICATIONS = (First, Every, ServerHooks, CommandHooks)


def configured(host: Host) -> None:
    host.configure(CONFIG)
    host.unconfigure()


def served(host: Host) -> None:
    """As a server builds its application."""
    create_app(ServerContext(Parrot(host, "parrot"), ServerConfig()))


def run(host: Host) -> Any:
    """As the command ``treadle`` asks for a subcommand."""
    host.add_hookspecs(CommandHooks)
    return host.first("commands", "key", "treadle_command", name="key")


# hook -> the call of the host that leads to it, and the arguments that must arrive
CALLS: dict[str, tuple[Call, dict[str, object]]] = {
    "treadle_model_source": (lambda h: h.model_source("key"), {"scheme": "key"}),
    "treadle_load_format": (
        lambda h: h.load_format("key", FILES),
        {"format": "key", "files": FILES},
    ),
    "treadle_tokenizer": (lambda h: h.tokenizer("key", FILES), {"mode": "key", "files": FILES}),
    "treadle_renderer": (
        lambda h: h.renderer("key", FILES, TOKENIZER),
        {"mode": "key", "files": FILES, "tokenizer": TOKENIZER},
    ),
    "treadle_model": (
        lambda h: h.model("key", CONFIG),
        {"architecture": "key", "hf_config": CONFIG},
    ),
    "treadle_quantization": (
        lambda h: h.quantization("key", {"bits": 4}, DEVICE),
        {"method": "key", "checkpoint": {"bits": 4}, "device": DEVICE},
    ),
    "treadle_multimodal": (
        lambda h: h.multimodal("key", FILES),
        {"architecture": "key", "files": FILES},
    ),
    "treadle_executor": (lambda h: h.executor("key", CONFIG), {"name": "key", "config": CONFIG}),
    "treadle_policy": (lambda h: h.policy("key"), {"name": "key"}),
    "treadle_proposer": (lambda h: h.proposer("key", CONFIG), {"name": "key", "config": CONFIG}),
    "treadle_kv_connector": (
        lambda h: h.kv_connector("key", t.ConnectorRole.WORKER, LAYOUT),
        {"name": "key", "role": t.ConnectorRole.WORKER, "layout": LAYOUT},
    ),
    "treadle_logits_processor": (
        lambda h: h.logits_processors(["key"], 99)[0],
        {"name": "key", "vocab_size": 99},
    ),
    "treadle_lora_resolver": (lambda h: h.lora_resolvers(["key"])[0], {"name": "key"}),
    "treadle_stat_logger": (lambda h: h.stat_loggers(["key"])[0], {"name": "key"}),
    "treadle_match": (
        lambda h: h.match("tool_parsers", "key", TRAITS),
        {"kind": "tool_parsers", "key": "key", "model": TRAITS},
    ),
    "treadle_grammar_compiler": (
        lambda h: h.grammar_compiler("key", TOKENIZER, 99),
        {"name": "key", "tokenizer": TOKENIZER, "vocab_size": 99},
    ),
    "treadle_tool_parser": (
        lambda h: h.tool_parser("key", TOKENIZER, []),
        {"name": "key", "tokenizer": TOKENIZER, "tools": []},
    ),
    "treadle_reasoning_parser": (
        lambda h: h.reasoning_parser("key", TOKENIZER, "<think>"),
        {"name": "key", "tokenizer": TOKENIZER, "prompt": "<think>"},
    ),
    "treadle_attention": (lambda h: h.attention_bids(ATTENTION), {"request": ATTENTION}),
    "treadle_kernel": (
        lambda h: h.kernel_bids("rms_norm", KERNEL),
        {"op": "rms_norm", "request": KERNEL},
    ),
    "treadle_configure": (configured, {"config": CONFIG}),
    "treadle_unconfigure": (configured, {}),
    "treadle_report": (lambda h: h.report(), {}),
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
def host(tmp_path: Path) -> Host:
    """A host with one plugin that owns ``key`` in every kind and says how it was called."""
    declared = {kind: ["key"] for kind in KINDS}
    text = f"from treadle.api import impl\nTREADLE = {declared!r}\nRECEIVED = {{}}\n"
    for hook in CALLS:
        names = arguments(hook)
        pairs = ", ".join(f"{name}={name}" for name in names)
        answer = repr(hook) if hasattr(First, hook) and hook != "treadle_match" else None
        text += IMPLEMENTATION.format(
            hook=hook, arguments=", ".join(names), pairs=pairs, answer=answer
        )
    file = tmp_path / "every_hook.py"
    file.write_text(text)
    colours = {f"{kind}:key": {"colour": kind} for kind in KINDS}
    return Host(PluginConfig(plugin_file=[str(file)], plugin_options=colours), source=list)


@pytest.mark.parametrize("hook", CALLS)
def test_a_hook_receives_every_argument(hook: str, host: Host) -> None:
    call, expected = CALLS[hook]
    plugin: Any = host.load("extensions", "key")
    if hook == "treadle_command":
        with pytest.raises(PluginLoadError, match="returned None"):
            call(host)
    else:
        answer = call(host)
        assert not hasattr(First, hook) or answer == (None if hook == "treadle_match" else hook)
    received = plugin.RECEIVED[hook]
    assert set(received) == set(arguments(hook))
    assert {name: received[name] for name in expected} == expected
    kinds = [name for name, kind in KINDS.items() if kind.hook == hook] or ["tool_parsers"]
    assert received.get("options", {"colour": kinds[0]}) == {"colour": kinds[0]}
    assert received.get("host", host) is host
    assert isinstance(received.get("app", AppConfig()), AppConfig)
    assert received.get("engine", Parrot) is Parrot or isinstance(received["engine"], Parrot)


def test_all_hooks_are_called_here() -> None:
    assert set(specifications()) == set(CALLS)


def test_the_specifications_are_all_there_are() -> None:
    """A distribution that adds hooks of its own adds them here."""
    assert {hook.name for hook in hooks()} == set(specifications())
