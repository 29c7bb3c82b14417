"""The generated part of docs/ref/plugins/KIND.md: the hook as it is called, and a whole plugin.

The example is the template of ``treadle plugin new``, which the tests install and run as it stands.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from string import Template
from typing import get_args

from repository import ROOT, hooks

from treadle.api import types
from treadle.plugins import installed_kinds
from treadle.testing.catalog import SUITES

__all__ = ("BLOCKS", "page")

MORE: dict[str, tuple[str, ...]] = {
    **{name: ("treadle_match",) for name, kind in installed_kinds().items() if kind.matches},
    "models": ("treadle_model_config",),
    "extensions": ("treadle_unconfigure", "treadle_report"),
}
"""Hooks that plugins of a kind may answer beside the one that the kind is named for."""

COST = {
    "engine": "A failure ends the start or the step.",
    "request": "A failure ends the request that needed the call.",
    "itself": "A failure costs the plugin alone: it is logged, and after three in a row the plugin is "
    "called once a minute only.",
}

FAILS = {
    "engine": "the start, the step or the request that needed it",
    "request": "the request that needed it",
    "itself": "the plugin alone, which is tried once a minute after three failures",
}
HANGS = {
    "start": "the start ends after `startup_timeout`",
    "step": "`/health` answers 503 after `hang_timeout` and names the method",
    "text": "the request fails after ten budgets; with eight stuck calls there is one trial a minute",
    "parser": "the answer goes on as text after ten budgets; with four stuck calls there is one trial a minute",
    "compile": "the compilation is killed, and its request fails; a matcher is part of the step, and if it is [isolated](../do/isolate.md), the requests with its grammars fail",
    "hook": "a server's process ends after two minutes",
    "route": "its requests, and others if it holds up the event loop; a signal ends the server; if it is [isolated](../do/isolate.md#routes), its own requests",
    "command": "the command, until Control-C",
}
CRASHES = {
    "start": "the engine; the start fails and names the last hook",
    "step": "the engine: running requests fail, and `/health` answers 503",
    "text": "the server; an [isolated](../do/isolate.md) renderer its request",
    "parser": "the server; if it is [isolated](../do/isolate.md), the answer goes on as text",
    "compile": "the compilation, and its request; a matcher is part of the step, and if it is [isolated](../do/isolate.md), it costs the requests with its grammars",
    "hook": "the process; the start fails and names the hook",
    "route": "the server; if it is [isolated](../do/isolate.md#routes), its own requests",
    "command": "the command",
}
PLACES = {
    "model_sources": "start",
    "load_formats": "start",
    "tokenizers": "text",
    "renderers": "text",
    "models": "step",
    "quantization": "step",
    "attention_backends": "step",
    "kernel_ops": "step",
    "communicators": "step",
    "executors": "step",
    "scheduling_policies": "step",
    "logits_processors": "step",
    "stat_loggers": "step",
    "structured_output": "compile",
    "tool_parsers": "parser",
    "reasoning_parsers": "parser",
    "extensions": "hook",
    "commands": "command",
    "server": "route",
}
"""Where the methods of a kind are called, or its hook, if it builds nothing."""

TEMPLATES = ROOT / "cli/treadle_cli/templates"
TYPE = r"\bt\.(\w+)"


def page(kind: str) -> str:
    """Signature, documentation and example of one kind."""
    plugin_kind = installed_kinds()[kind]
    names = (plugin_kind.hook, *MORE.get(kind, ()))
    signatures = [h.signature for name in names for h in hooks() if h.name == name]
    example = "MyForCausalLM" if kind == "models" else "mine"
    variables = {
        "key": example,
        "package": f"treadle_{example.lower()}",
        "kind": kind,
        "title": "Mine",
    }
    sections = [
        f"Group `{plugin_kind.group}`, key: {plugin_kind.key}, mode *{plugin_kind.mode}*, generation {plugin_kind.generation}."
        f" {COST[plugin_kind.failure]}",
        "```text\n" + "\n".join(signatures) + "\n```",
        f"`treadle plugin new {kind} {example}` writes this plugin, with a README that says what it "
        "changes\nwhere it is installed, how to try it, and what to change first:",
    ]
    files = sorted((TEMPLATES / kind).glob("*.py.in"), key=lambda p: (p.stem == "test.py", p.name))
    for file in files:
        name = file.name.removesuffix(".in")
        file_path = (
            "tests/test_conformance.py" if name == "test.py" else f"{variables['package']}/{name}"
        )
        text = Template(file.read_text()).substitute(variables)
        sections.append(f"`{file_path}`:\n\n```python\n{text}```")
    suite = SUITES.get(kind, "treadle.testing.plugin:PluginSuite").replace(":", ".")
    sections.append(f"Its suite is `{suite}`.")
    if sources := _types(signatures):
        code = "\n\n".join(sources)
        sections.append(
            f"### Types\n\nOf `treadle.api.types`, as they are written there:\n\n```py\n{code}```"
        )
    return "\n" + "\n\n".join(sections) + "\n\n"


def faults() -> str:
    """What each way to go wrong costs, by kind."""
    rows = [
        f"| `{name}` | {'the command' if name == 'commands' else FAILS[kind.failure]} | {HANGS[PLACES[name]]} | {CRASHES[PLACES[name]]} |"
        for name, kind in installed_kinds().items()
    ]
    head = "| Kind | Raises, wrong result, `sys.exit` | Does not return | Ends its process |"
    return "\n".join([head, "|---|---|---|---|", *rows]) + "\n"


def _types(signatures: list[str]) -> list[str]:
    """The source of what hooks get and return, and of what that is made of; without what the hook
    of another kind returns, which is on that kind's page."""
    queue = re.findall(TYPE, "\n".join(signatures))
    returned_types = {
        h.signature: re.findall(TYPE, h.signature.rpartition("->")[2]) for h in hooks()
    }
    own_types = {name for signature in signatures for name in returned_types[signature]}
    other_types = {name for names in returned_types.values() for name in names} - own_types
    sources: dict[str, str] = {}
    while queue:
        name = queue.pop(0)
        type_ = getattr(types, name, None)
        if name in sources or name in other_types or type_ is None:
            continue
        if inspect.isclass(type_):
            sources[name] = inspect.getsource(type_)
            queue += re.findall(r"\b[A-Z]\w+", sources[name])
        else:  # a union
            queue += [member.__name__ for member in get_args(type_) if inspect.isclass(member)]
    return list(sources.values())


BLOCKS: dict[str, Callable[[], str]] = {"plugin_faults": faults} | {
    f"kind_{kind}": partial(page, kind) for kind in installed_kinds()
}
