"""Every hook of the core, called as the core calls it, with every argument of its specification."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.api import types as t
from weft.api.hookspecs import First
from weft.config import EngineConfig, PluginConfig
from weft.plugins import KINDS, Host

CONFIG = EngineConfig()
FILES = t.ModelFiles(Path("nowhere"), (), {})
TOKENIZER: Any = object()
LAYOUT = t.CacheLayout(16, 8, ())
DEVICE = t.DeviceInfo("cpu")
TRAITS = t.ModelTraits()

Call = Callable[[Host], Any]

# hook -> the call of the host that leads to it, and the arguments that must arrive
CALLS: dict[str, tuple[Call, dict[str, object]]] = {
    "weft_model_source": (lambda h: h.model_source("key"), {"scheme": "key"}),
    "weft_load_format": (lambda h: h.load_format("key", FILES), {"format": "key", "files": FILES}),
    "weft_tokenizer": (lambda h: h.tokenizer("key", FILES), {"mode": "key", "files": FILES}),
    "weft_renderer": (
        lambda h: h.renderer("key", FILES, TOKENIZER),
        {"mode": "key", "files": FILES, "tokenizer": TOKENIZER},
    ),
    "weft_model": (lambda h: h.model("key", CONFIG), {"architecture": "key", "hf_config": CONFIG}),
    "weft_quantization": (
        lambda h: h.quantization("key", {"bits": 4}, DEVICE),
        {"method": "key", "checkpoint": {"bits": 4}, "device": DEVICE},
    ),
    "weft_multimodal": (
        lambda h: h.multimodal("key", FILES),
        {"architecture": "key", "files": FILES},
    ),
    "weft_executor": (lambda h: h.executor("key", CONFIG), {"name": "key", "config": CONFIG}),
    "weft_policy": (lambda h: h.policy("key"), {"name": "key"}),
    "weft_proposer": (lambda h: h.proposer("key", CONFIG), {"name": "key", "config": CONFIG}),
    "weft_kv_connector": (
        lambda h: h.kv_connector("key", t.ConnectorRole.WORKER, LAYOUT),
        {"name": "key", "role": t.ConnectorRole.WORKER, "layout": LAYOUT},
    ),
    "weft_logits_processor": (
        lambda h: h.logits_processors(["key"], 99)[0],
        {"name": "key", "vocab_size": 99},
    ),
    "weft_lora_resolver": (lambda h: h.lora_resolvers(["key"])[0], {"name": "key"}),
    "weft_stat_logger": (lambda h: h.stat_loggers(["key"])[0], {"name": "key"}),
    "weft_match": (
        lambda h: h.match("tool_parsers", "key", TRAITS),
        {"kind": "tool_parsers", "key": "key", "model": TRAITS},
    ),
    "weft_grammar_compiler": (
        lambda h: h.grammar_compiler("key", TOKENIZER, 99),
        {"name": "key", "tokenizer": TOKENIZER, "vocab_size": 99},
    ),
    "weft_tool_parser": (
        lambda h: h.tool_parser("key", TOKENIZER, []),
        {"name": "key", "tokenizer": TOKENIZER, "tools": []},
    ),
    "weft_reasoning_parser": (
        lambda h: h.reasoning_parser("key", TOKENIZER, "<think>"),
        {"name": "key", "tokenizer": TOKENIZER, "prompt": "<think>"},
    ),
}

IMPLEMENTATION = """
@impl
def {hook}({arguments}):
    return {hook!r}, dict({pairs})
"""


def arguments(hook: str) -> list[str]:
    return [name for name in inspect.signature(getattr(First, hook)).parameters if name != "self"]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A host with one plugin that owns ``key`` in every kind and says how it was called."""
    declared = {kind.name: ["key"] for kind in KINDS.values() if kind.hook in CALLS}
    text = f"from weft.api import impl\nWEFT = {declared!r}\n"
    for hook in CALLS:
        names = arguments(hook)
        pairs = ", ".join(f"{name}={name}" for name in names)
        text += IMPLEMENTATION.format(hook=hook, arguments=", ".join(names), pairs=pairs)
    file = tmp_path / "every_hook.py"
    file.write_text(text)
    options = {"models:key": {"colour": "red"}}
    return Host(PluginConfig(plugin_file=[str(file)], plugin_options=options), source=list)


@pytest.mark.parametrize("hook", CALLS)
def test_a_hook_receives_every_argument(hook: str, host: Host) -> None:
    call, expected = CALLS[hook]
    called, received = call(host)
    assert called == hook
    assert set(received) == set(arguments(hook))
    assert {name: received[name] for name in expected} == expected
    assert received["options"] == ({"colour": "red"} if hook == "weft_model" else {})
    assert received.get("host", host) is host


def test_all_keyed_hooks_are_called_here() -> None:
    assert {name for name in vars(First) if name.startswith("weft_")} == set(CALLS)
