"""The tools of a response: flat functions, custom tools and namespaces of both, as those of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from treadle.errors import RequestError
from treadle_server.chat.tools import MAX_TOOLS
from treadle_server.responses.request import ResponseTool, ResponseToolChoice
from treadle_server.wire.tools import (
    AllowedTools,
    ChatTool,
    CustomTool,
    FunctionSpec,
    ToolChoice,
    ToolReference,
)

__all__ = ("ToolTable", "to_tool_choice")


class ServedTool(msgspec.Struct, frozen=True):
    """A tool under the name that the client gave it."""

    name: str
    namespace: str | None
    is_custom: bool


class ToolTable:
    """The tools that the model may call, by the names under which it knows them.

    Two namespaces may have a tool of one name: the later one is known as ``namespace__name``.
    """

    def __init__(self, tools: Sequence[ResponseTool]) -> None:
        """Raises ``RequestError`` for a tool without a name, and for too many."""
        self.chat_tools: list[ChatTool] = []
        self.dropped: list[str] = []
        """The types of tools that only a host of its own can run."""
        self.served: dict[str, ServedTool] = {}
        for path, tool, namespace in self._flat(tools):
            if not tool.name:
                raise RequestError(f"{path} has no name", param=f"{path}.name")
            if len(self.chat_tools) >= MAX_TOOLS:
                raise RequestError(f"tools has more than {MAX_TOOLS} entries", param="tools")
            name = tool.name
            if name in self.served and namespace is not None:
                name = f"{namespace}__{name}"
            self.served[name] = ServedTool(tool.name, namespace, tool.type == "custom")
            self.chat_tools.append(chat_tool(tool, name))

    def _flat(
        self, tools: Sequence[ResponseTool]
    ) -> Iterator[tuple[str, ResponseTool, str | None]]:
        for i, tool in enumerate(tools):
            if tool.type in ("function", "custom"):
                yield f"tools[{i}]", tool, None
            elif tool.type == "namespace":
                for k, inner in enumerate(tool.tools or ()):
                    if inner.type in ("function", "custom"):
                        yield f"tools[{i}].tools[{k}]", inner, tool.name or ""
                    else:
                        self.dropped.append(inner.type)
            else:
                self.dropped.append(tool.type)

    def known_name(self, name: str, namespace: str | None) -> str:
        """Return the name under which the model knows a tool that the client names."""
        qualified = f"{namespace}__{name}"
        return qualified if namespace is not None and qualified in self.served else name

    def of(self, known_name: str) -> ServedTool:
        """Return the tool that the model has called; a function if there is none of that name."""
        return self.served.get(known_name) or ServedTool(known_name, None, is_custom=False)


def chat_tool(tool: ResponseTool, name: str) -> ChatTool:
    if tool.type == "custom":
        custom = CustomTool(name=name, description=tool.description, format=tool.format)
        return ChatTool(type="custom", custom=custom)
    return ChatTool(
        function=FunctionSpec(
            name=name,
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
    )


def to_tool_choice(
    choice: str | ResponseToolChoice | None, table: ToolTable
) -> str | ToolChoice | None:
    """Return the choice in the form of a chat. Raises ``RequestError``."""
    if not isinstance(choice, ResponseToolChoice):
        # Without its hosted tools a request may have none left to choose from.
        return None if choice == "auto" and not table.chat_tools else choice
    if choice.type == "allowed_tools":
        references = [ToolReference(name=tool.name) for tool in choice.tools or ()]
        allowed = AllowedTools(mode=choice.mode or "auto", tools=references)
        return ToolChoice(type="allowed_tools", allowed_tools=allowed)
    if choice.type not in ("function", "custom"):
        raise RequestError(
            f"tool_choice is of type {choice.type[:64]!r}; this server has no tools of its own: "
            "name a function, a custom tool, or allowed_tools",
            param="tool_choice.type",
        )
    return ToolChoice(type="function", name=choice.name)


def echoed_tools(tools: Sequence[ResponseTool]) -> list[dict[str, Any]]:
    """Return the tools as the answer repeats them, with the fields that its types need."""
    echoed = []
    for tool in tools:
        fields = {k: v for k, v in msgspec.to_builtins(tool).items() if v is not None}
        if tool.type == "function":
            fields = {"parameters": None, "strict": None, **fields}
        echoed.append(fields)
    return echoed
