"""The kinds of plugins that this treadle knows, as data.

An entry-point group is ``treadle.KIND`` or ``treadle.KIND.vN``, where N is the generation of the kind's
hook. Adding an argument to a hook keeps its generation; renaming the hook or changing what it
returns is a new one. Generations are per kind, so that a change of the KV layout does not touch
the parsers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from treadle.api.hookspecs import PROJECT

__all__ = ("FALLBACK", "KINDS", "OVERRIDES", "Kind", "Mode", "parse_group")

Mode = Literal["one", "many", "bid", "always"]

FALLBACK = "*"
"""The key that serves every key of its kind that nobody else declares."""

OVERRIDES = "overrides"
"""The group whose entries are named ``kind.key`` and replace the plain owner of that key."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of plugin.

    ``one``: the owner of the asked key is imported and called. ``many``: the owners of a list of
    keys that the user gave. ``bid``: all are asked, the best answer wins. ``always``: all are
    imported at start and called.
    """

    name: str
    key: str
    """What a key is, in words."""
    mode: Mode
    hook: str
    generation: int = 1
    owner: str = "treadle-core"
    """The distribution whose hook specification it is."""
    budget: float = 10.0
    """Seconds that one call of a method of what its hook returns may take before it counts as
    slow; of a hook, ten if that is more. Only what serves requests has less."""
    loads: str = ""
    """The method, if any, that fetches or loads a model of any size, which may take ten minutes."""


def _kinds() -> Mapping[str, Kind]:
    kinds = (
        Kind("model_sources", "URI scheme", "one", "treadle_model_source", loads="resolve"),
        Kind("load_formats", "checkpoint format", "one", "treadle_load_format"),
        Kind("tokenizers", "tokenizer mode", "one", "treadle_tokenizer"),
        Kind("renderers", "renderer mode", "one", "treadle_renderer", budget=2.0),
        Kind("models", "architecture", "one", "treadle_model"),
        Kind("quantization", "quant_method", "one", "treadle_quantization"),
        Kind("multimodal", "architecture", "one", "treadle_multimodal"),
        Kind("attention", "backend", "bid", "treadle_attention"),
        Kind("kernels", "backend", "bid", "treadle_kernel"),
        Kind("executors", "name", "one", "treadle_executor", loads="start"),
        Kind("policies", "name", "one", "treadle_policy", budget=0.005),
        Kind("proposers", "name", "one", "treadle_proposer"),
        Kind("kv_connectors", "name", "one", "treadle_kv_connector"),
        Kind("logits_processors", "name", "many", "treadle_logits_processor", budget=0.02),
        Kind("lora_resolvers", "name", "many", "treadle_lora_resolver"),
        Kind("stat_loggers", "name", "many", "treadle_stat_logger", budget=0.005),
        Kind("guided", "backend", "one", "treadle_grammar_compiler"),
        Kind("tool_parsers", "name", "one", "treadle_tool_parser", budget=0.25),
        Kind("reasoning", "name", "one", "treadle_reasoning_parser", budget=0.25),
        Kind("extensions", "name", "always", "treadle_configure"),
        Kind("server", "name", "always", "treadle_server", owner="treadle-server"),
        Kind("commands", "subcommand", "one", "treadle_command", owner="treadle-cli"),
    )
    return {kind.name: kind for kind in kinds}


KINDS: Mapping[str, Kind] = _kinds()

_GROUP = re.compile(rf"{PROJECT}\.([a-z_]+)(?:\.v([1-9][0-9]*))?")


def parse_group(group: str) -> tuple[str, int] | None:
    """``("attention", 2)`` for ``treadle.attention.v2``; ``None`` for a group that is not of treadle."""
    if found := _GROUP.fullmatch(group):
        return found[1], int(found[2] or 1)
    if group.startswith(f"{PROJECT}."):
        return group.removeprefix(f"{PROJECT}."), 0
    return None
