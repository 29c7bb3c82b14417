"""Tools of a chat: functions, custom tools and the older ``functions``, as the template sees them.

The model calls functions only: a custom tool is a function with one text, ``input``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from treadle.errors import RequestError
from treadle_server.wire.chat import ChatRequest
from treadle_server.wire.tools import ChatTool, CustomTool, FunctionSpec, ToolChoice, ToolReference

__all__ = (
    "MAX_TOOLS",
    "MAX_TOOL_BYTES",
    "ToolSelection",
    "custom_names",
    "select_tools",
    "to_tools",
)

MAX_TOOLS = 128
MAX_TOOL_BYTES = 256 * 2**10
Choice = str | Mapping[str, Any] | None


class ToolSelection(msgspec.Struct, frozen=True, kw_only=True):
    """The tools that the model may call, and whether it must."""

    tools: list[dict[str, Any]] | None = None
    choice: Choice = None
    is_parallel: bool = True


def select_tools(request: ChatRequest) -> ToolSelection:
    """Return the tools of a request and its choice among them. Raises ``RequestError``."""
    if request.functions is not None:
        if request.tools is not None:
            raise RequestError("tools and functions are given; send tools only", param="functions")
        functions = [ChatTool(function=function) for function in request.functions]
        called = request.function_call
        return ToolSelection(
            tools=to_tools(functions, "functions"),
            choice=called if isinstance(called, str | None) else named_choice(called.name),
            is_parallel=False,
        )
    if not isinstance(request.function_call, str | None):
        raise RequestError("function_call needs functions", param="function_call")
    tools, selected = to_tools(request.tools), request.tool_choice
    choice: Choice
    if isinstance(selected, ToolChoice):
        choice, tools = to_choice(selected, tools)
    else:
        choice = "required" if selected == "any" else selected
    return ToolSelection(
        tools=tools, choice=choice, is_parallel=request.parallel_tool_calls is not False
    )


def to_choice(
    selected: ToolChoice, tools: list[dict[str, Any]] | None
) -> tuple[Choice, list[dict[str, Any]] | None]:
    """Return the choice in the form of the core, and the tools without those that are not allowed."""
    if selected.type != "allowed_tools":
        name = name_of(selected)
        if name is None:
            raise RequestError(
                f"tool_choice of type {selected.type} names no tool; send "
                f'{{"type": "{selected.type}", "{selected.type}": {{"name": …}}}}',
                param="tool_choice",
            )
        return named_choice(name), tools
    allowed = selected.allowed_tools
    names = {name_of(tool) for tool in allowed.tools} if allowed is not None else set()
    if allowed is None or not names:
        raise RequestError(
            "tool_choice of type allowed_tools names no tools; send "
            '{"allowed_tools": {"mode": "auto", "tools": […]}}',
            param="tool_choice.allowed_tools",
        )
    known = {tool["function"]["name"] for tool in tools or ()}
    if unknown := next((name for name in names if name not in known), None):
        raise RequestError(
            f"tool_choice allows {unknown[:64]!r}, which is not among the tools: "
            f"{', '.join(sorted(known))}"[:1000],
            param="tool_choice.allowed_tools",
        )
    return allowed.mode, [tool for tool in tools or () if tool["function"]["name"] in names]


def name_of(reference: ToolReference) -> str | None:
    named = reference.function or reference.custom
    return reference.name if named is None else named.name


def named_choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def custom_names(request: ChatRequest) -> frozenset[str]:
    """Return the names of the custom tools of a request."""
    return frozenset(t.custom.name for t in request.tools or () if t.custom is not None)


def to_tools(tools: Sequence[ChatTool] | None, param: str = "tools") -> list[dict[str, Any]] | None:
    """Return the tools in the form of a template, or ``None``. Raises ``RequestError`` beyond the bounds."""
    if not tools:
        return None
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"{param} has {len(tools)} entries; at most {MAX_TOOLS}", param=param)
    size = len(msgspec.json.encode(tools))
    if size > MAX_TOOL_BYTES:
        raise RequestError(
            f"{param} take {size} bytes of JSON; at most {MAX_TOOL_BYTES} are allowed", param=param
        )
    functions = []
    for i, tool in enumerate(tools):
        function = tool.function if tool.type == "function" else to_function(tool.custom)
        if function is None:
            raise RequestError(
                f"{param}[{i}] is of type {tool.type} and has no field {tool.type}",
                param=f"{param}[{i}].{tool.type}",
            )
        if not (0 < len(function.name) <= 128 and function.name.isprintable()):
            raise RequestError(
                f"{param}[{i}].{tool.type}.name must be 1 to 128 printable characters",
                param=f"{param}[{i}].{tool.type}.name",
            )
        functions.append({"type": "function", "function": msgspec.to_builtins(function)})
    return functions


def to_function(tool: CustomTool | None) -> FunctionSpec | None:
    """Return the function that stands for a custom tool.

    Its grammar is told to the model. A regular expression also belongs to the schema of the arguments,
    which calls that the request demands are held to.
    """
    if tool is None:
        return None
    description = tool.description or ""
    text = {"type": "string", "description": "The text that the tool gets."}
    if tool.format is not None and tool.format.type == "grammar":
        grammar = tool.format.grammar or tool.format
        syntax, definition = grammar.syntax or "grammar", grammar.definition or ""
        description += f"\nThe input must match this {syntax}:\n{definition}"
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
    return FunctionSpec(
        name=tool.name,
        description=description.strip() or None,
        parameters={"type": "object", "properties": {"input": text}, "required": ["input"]},
    )
