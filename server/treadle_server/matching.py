"""Which parsers a server uses: those that the options name, or those that are made for the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from treadle.api.kinds import REASONING, TOOL_PARSERS
from treadle.api.matching import ModelTraits
from treadle.api.plugin_kind import PluginKind
from treadle.plugins import PluginManager
from treadle.plugins.matching import NONE, Decision, decide
from treadle_server.config import ServerConfig

__all__ = ("PARSERS", "choose_parser", "with_parsers")

log = logging.getLogger("treadle.server")

PARSERS: Mapping[str, PluginKind[Any]] = {
    "tool_parser": TOOL_PARSERS,
    "reasoning_parser": REASONING,
}
"""Option of the server, kind of plugin."""


def choose_parser(
    option: str, config: ServerConfig, host: PluginManager, traits: ModelTraits
) -> Decision:
    """What one option means for a model. Raises ``PluginConflictError`` if several parsers match."""
    return decide(host, PARSERS[option], traits, getattr(config, option) or NONE)


def with_parsers(config: ServerConfig, host: PluginManager, traits: ModelTraits) -> ServerConfig:
    """``config`` with the names of the parsers, ``None`` for none. Raises as ``choose_parser``."""
    chosen: dict[str, str | None] = {}
    for option in PARSERS:
        decision = choose_parser(option, config, host, traits)
        chosen[option] = decision.key
        log.debug("%s: %s, %s", option, decision.key or NONE, decision.reason)
    return msgspec.structs.replace(config, **chosen)
