"""``tools`` and ``tool_choice``: what the template sees, who parses, and what must be generated."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from treadle.api.kinds import TOOL_PARSERS
from treadle.api.parsers import Tool
from treadle.api.sampling_params import GuidedParams
from treadle.api.structured_output import GrammarSpec
from treadle.errors import PluginLoadError, RequestError
from treadle_server.context import Context
from treadle_server.messages import to_tools
from treadle_server.wire.chat import ChatRequest, NamedChoice

__all__ = ("Toolbox", "toolbox")

log = logging.getLogger("treadle.server")


class Toolbox(msgspec.Struct, kw_only=True):
    """``rendered`` goes into the prompt, ``parsed`` to the parser; both are empty without tools."""

    rendered: list[dict[str, Any]] | None = None
    parsed: list[Tool] = []
    guided: GuidedParams | None = None


async def toolbox(request: ChatRequest, context: Context) -> Toolbox:
    """Check the tools of a request. Raises ``RequestError``."""
    rendered, choice = to_tools(request.tools), request.tool_choice
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise RequestError(
            f"tool_choice is {choice[:64]!r}; it must be none, auto, required or a named function",
            param="tool_choice",
        )
    if rendered is None or request.tools is None:
        if choice not in (None, "none", "auto"):
            raise RequestError(
                "tool_choice asks for a call but there are no tools; send tools",
                param="tool_choice",
            )
        return Toolbox()
    if choice == "none":
        return Toolbox()
    if context.config.tool_parser is None:
        known = ", ".join(context.engine.host.keys("tool_parsers")) or "none installed"
        raise RequestError(
            "this server does not parse tool calls: start it with --tool-parser NAME "
            f"(known: {known}), or send tool_choice none",
            param="tool_choice",
        )
    parsed = [
        Tool(
            name=t.function.name,
            description=t.function.description or "",
            parameters=t.function.parameters or {},
            strict=bool(t.function.strict),
        )
        for t in request.tools
    ]
    if choice in (None, "auto"):
        return Toolbox(rendered=rendered, parsed=parsed)
    wanted = named(choice, parsed) if isinstance(choice, NamedChoice) else "required"
    return Toolbox(rendered=rendered, parsed=parsed, guided=await forced(context, parsed, wanted))


def named(choice: NamedChoice, tools: Sequence[Tool]) -> Mapping[str, Any]:
    name = choice.function.name
    if all(tool.name != name for tool in tools):
        known = ", ".join(tool.name for tool in tools)
        raise RequestError(
            f"tool_choice names {name[:64]!r}, which is not among the tools: {known}",
            param="tool_choice",
        )
    return {"type": "function", "function": {"name": name}}


async def forced(
    context: Context, tools: Sequence[Tool], choice: str | Mapping[str, Any]
) -> GuidedParams:
    """The constraint that makes the model call. The engine refuses it if it cannot enforce it."""
    name, guided = context.config.tool_parser or "", None
    work = partial(forcing, context, name, tools, choice)
    try:
        guided = await context.asked("tool_parsers", name, "grammar", work)
    except PluginLoadError as error:
        log.warning("tool_parser=%s cannot force a call: %s", name, error, exc_info=error)
        context.metrics.parser_failed(f"tool_parser={name}")
    if guided is None:
        raise RequestError(
            f"the tool parser {name} cannot force a call; send tool_choice auto",
            param="tool_choice",
        )
    return guided


def forcing(
    context: Context, name: str, tools: Sequence[Tool], choice: str | Mapping[str, Any]
) -> GuidedParams | None:
    parser = context.engine.host.create(
        TOOL_PARSERS, name, tokenizer=context.engine.tokenizer, tools=tools
    )
    spec = parser.grammar(choice)
    return None if spec is None else to_guided(spec)


def to_guided(spec: GrammarSpec) -> GuidedParams | None:
    """``None`` for a kind of grammar that requests cannot ask for. Raises for what is no grammar."""
    if not isinstance(spec.source, str):
        raise TypeError(f"the source of a grammar is {spec.source!r:.80}; a text is wanted")
    match spec.kind:
        case "json_schema":
            return GuidedParams(json=spec.source)
        case "json_object":
            return GuidedParams(json_object=True)
        case "regex":
            return GuidedParams(regex=spec.source)
        case "choice":
            return GuidedParams(choice=msgspec.json.decode(spec.source, type=list[str]))
        case "ebnf":
            return GuidedParams(grammar=spec.source)
        case _:
            return None
