"""``tools`` and ``tool_choice``: what the template sees, who parses, what must be generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from treadle.api.parsers import Tool
from treadle.api.sampling_params import StructuredOutputsParams
from treadle.api.structured_output import GrammarSpec
from treadle.errors import RequestError

__all__ = ("check_choice", "parse_tools", "to_structured_outputs")

CHOICES = ("none", "auto", "required")
FIELDS = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}


def parse_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Tool]:
    """Return the tools of a request in the form of the OpenAI API, ``{"type": "function", …}``.

    Raises ``RequestError``.
    """
    return [_tool(i, tool) for i, tool in enumerate(tools or ())]


def _tool(index: int, tool: Any) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(
            f"tools[{index}] is {tool!r:.80}; a tool is "
            '{"type": "function", "function": {"name": …, "parameters": …}}',
            param=f"tools[{index}]",
        )
    return Tool(
        name=function["name"],
        description=function.get("description") or "",
        parameters=function.get("parameters") or {},
        strict=bool(function.get("strict")),
    )


def check_choice(
    choice: str | Mapping[str, Any] | None, tools: Sequence[Tool]
) -> str | Mapping[str, Any]:
    """Return ``tool_choice`` as ``none``, ``auto``, ``required`` or a named function.

    Raises ``RequestError`` for another form, a function that is not among ``tools``, or a call
    that is requested without tools.
    """
    if choice is None:
        return "auto" if tools else "none"
    if isinstance(choice, str):
        if choice not in CHOICES:
            raise RequestError(
                f"tool_choice is {choice[:64]!r}; it must be none, auto, required or a named "
                "function",
                param="tool_choice",
            )
        if tools or choice != "required":
            return choice if tools else "none"
    if not tools:
        raise RequestError(
            "tool_choice asks for a call but there are no tools; send tools", param="tool_choice"
        )
    return _named_function(choice, tools)


def _named_function(choice: Any, tools: Sequence[Tool]) -> Mapping[str, Any]:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(
            f"tool_choice is {choice!r:.80}; a named function is "
            '{"type": "function", "function": {"name": …}}',
            param="tool_choice",
        )
    if all(tool.name != name for tool in tools):
        tool_names = ", ".join(tool.name for tool in tools)
        raise RequestError(
            f"tool_choice names {name[:64]!r}, which is not among the tools: {tool_names}",
            param="tool_choice",
        )
    return {"type": "function", "function": {"name": name}}


def to_structured_outputs(spec: GrammarSpec) -> StructuredOutputsParams:
    """Return the constraint that a parser's grammar makes.

    Raises ``TypeError`` for something that is not a grammar.
    """
    if not isinstance(spec.source, str):
        raise TypeError(f"the source of a grammar is {spec.source!r:.80}; it must be a text")
    if spec.kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if spec.kind == "choice":
        return StructuredOutputsParams(choice=msgspec.json.decode(spec.source, type=list[str]))
    fields: dict[str, Any] = {FIELDS[spec.kind]: spec.source}
    return StructuredOutputsParams(**fields, reasoning=spec.options.get("reasoning"))
