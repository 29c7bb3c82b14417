"""The kinds of plugins that this weft knows, as data.

An entry-point group is ``weft.KIND`` or ``weft.KIND.vN``, where N is the generation of the kind's
hook. Adding an argument to a hook keeps its generation; renaming the hook or changing what it
returns is a new one. Generations are per kind, so that a change of the KV layout does not touch
the parsers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from weft.api.hookspecs import PROJECT

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
    owner: str = "weft-core"
    """The distribution whose hook specification it is."""
    budget: float = 10.0
    """Seconds that one call of a method of what its hook returns may take before it counts as
    slow; of a hook, ten if that is more. Only what serves requests has less."""
    loads: str = ""
    """The method, if any, that fetches or loads a model of any size, which may take ten minutes."""


def _kinds() -> Mapping[str, Kind]:
    kinds = (
        Kind("model_sources", "URI scheme", "one", "weft_model_source", loads="resolve"),
        Kind("load_formats", "checkpoint format", "one", "weft_load_format"),
        Kind("tokenizers", "tokenizer mode", "one", "weft_tokenizer"),
        Kind("renderers", "renderer mode", "one", "weft_renderer", budget=2.0),
        Kind("models", "architecture", "one", "weft_model"),
        Kind("quantization", "quant_method", "one", "weft_quantization"),
        Kind("multimodal", "architecture", "one", "weft_multimodal"),
        Kind("attention", "backend", "bid", "weft_attention"),
        Kind("kernels", "backend", "bid", "weft_kernel"),
        Kind("executors", "name", "one", "weft_executor", loads="start"),
        Kind("policies", "name", "one", "weft_policy", budget=0.005),
        Kind("proposers", "name", "one", "weft_proposer"),
        Kind("kv_connectors", "name", "one", "weft_kv_connector"),
        Kind("logits_processors", "name", "many", "weft_logits_processor", budget=0.02),
        Kind("lora_resolvers", "name", "many", "weft_lora_resolver"),
        Kind("stat_loggers", "name", "many", "weft_stat_logger", budget=0.005),
        Kind("guided", "backend", "one", "weft_grammar_compiler"),
        Kind("tool_parsers", "name", "one", "weft_tool_parser", budget=0.25),
        Kind("reasoning", "name", "one", "weft_reasoning_parser", budget=0.25),
        Kind("extensions", "name", "always", "weft_configure"),
        Kind("server", "name", "always", "weft_server", owner="weft-server"),
        Kind("commands", "subcommand", "one", "weft_command", owner="weft-cli"),
    )
    return {kind.name: kind for kind in kinds}


KINDS: Mapping[str, Kind] = _kinds()

_GROUP = re.compile(rf"{PROJECT}\.([a-z_]+)(?:\.v([1-9][0-9]*))?")


def parse_group(group: str) -> tuple[str, int] | None:
    """``("attention", 2)`` for ``weft.attention.v2``; ``None`` for a group that is not of weft."""
    if found := _GROUP.fullmatch(group):
        return found[1], int(found[2] or 1)
    if group.startswith(f"{PROJECT}."):
        return group.removeprefix(f"{PROJECT}."), 0
    return None
