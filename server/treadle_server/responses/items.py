"""From the items of a conversation to the messages of a chat.

What one turn of the model has said is several items here, and one message there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from treadle.errors import RequestError
from treadle_server.responses.request import InputContent, InputItem
from treadle_server.responses.tools import ToolTable
from treadle_server.wire.messages import (
    AssistantMessage,
    CalledCustomTool,
    CalledFunction,
    DeveloperMessage,
    Message,
    MessageToolCall,
    SystemMessage,
    ToolMessage,
    UserMessage,
)

__all__ = ("MAX_ITEMS", "to_messages")

MAX_ITEMS = 4096
HOSTED = frozenset(
    {"code_interpreter_call", "compaction", "file_search_call", "image_generation_call"}
    | {"mcp_list_tools", "tool_search_call", "tool_search_output", "web_search_call"}
)
"""Items of tools that other hosts run. They hold nothing that a model reads."""
TEXT_TYPES = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
Turn = type[UserMessage] | type[SystemMessage] | type[DeveloperMessage]
TURNS: Mapping[str, Turn] = {
    "user": UserMessage,
    "system": SystemMessage,
    "developer": DeveloperMessage,
}


def to_messages(items: Sequence[InputItem], table: ToolTable) -> tuple[list[Message], list[str]]:
    """Return the messages, and the types of items that were left out. Raises ``RequestError``."""
    if len(items) > MAX_ITEMS:
        raise RequestError(
            f"input has {len(items)} items, those of previous responses included; at most "
            f"{MAX_ITEMS} are allowed",
            param="input",
        )
    messages: list[Message] = []
    dropped: list[str] = []
    for i, item in enumerate(items):
        path = f"input[{i}]"
        match item.type:
            case None | "message":
                add_message(messages, item, path)
            case "reasoning":
                if thought := text_of([*(item.content or ())] or item.summary or [], path):
                    turn = assistant_turn(messages, is_new=True)
                    turn.reasoning = thought
            case "function_call" | "custom_tool_call":
                add_call(messages, item, path, table)
            case "function_call_output" | "custom_tool_call_output":
                if item.output is None:
                    raise RequestError(f"{path} has no output", param=f"{path}.output")
                messages.append(
                    ToolMessage(content=text_of(item.output, path), tool_call_id=item.call_id)
                )
            case kind if kind in HOSTED:
                dropped.append(kind)
            case kind:
                raise RequestError(
                    f"{path} is of type {kind[:64]!r}, which is not served; allowed are message, "
                    "reasoning, function_call, function_call_output, custom_tool_call, "
                    "custom_tool_call_output and item_reference",
                    param=f"{path}.type",
                )
    return messages, dropped


def add_message(messages: list[Message], item: InputItem, path: str) -> None:
    text = text_of(item.content or "", path)
    if item.role == "assistant":
        turn = assistant_turn(messages, is_new=False)
        turn.content = text if turn.content is None else f"{turn.content}\n{text}"
        return
    turn_type = TURNS.get(item.role or "")
    if turn_type is None:
        raise RequestError(
            f"{path}.role is {item.role!r:.80}; it must be user, assistant, system or developer",
            param=f"{path}.role",
        )
    messages.append(turn_type(content=text))


def add_call(messages: list[Message], item: InputItem, path: str, table: ToolTable) -> None:
    if not item.name:
        raise RequestError(f"{path} has no name", param=f"{path}.name")
    name = table.known_name(item.name, item.namespace)
    call = MessageToolCall(id=item.call_id or item.id)
    if item.type == "custom_tool_call":
        call.custom = CalledCustomTool(name=name, input=item.input)
    else:
        call.function = CalledFunction(name=name, arguments=item.arguments)
    turn = assistant_turn(messages, is_new=False, is_call=True)
    turn.tool_calls = [*(turn.tool_calls or ()), call]


def assistant_turn(
    messages: list[Message], *, is_new: bool, is_call: bool = False
) -> AssistantMessage:
    """Return the message of the turn that the last items belong to, or a new one.

    A thought begins a turn, and so does a text after a call.
    """
    last = messages[-1] if messages else None
    if isinstance(last, AssistantMessage) and not is_new and (is_call or not last.tool_calls):
        return last
    turn = AssistantMessage()
    messages.append(turn)
    return turn


def text_of(value: str | Sequence[InputContent] | Sequence[object], path: str) -> str:
    """Return the text of a content. Raises ``RequestError`` for what is no text."""
    if isinstance(value, str):
        return value
    texts = []
    for i, part in enumerate(value):
        if not isinstance(part, InputContent):  # the content of a thought that is one text
            texts.append(str(part))
        elif part.type == "refusal":
            texts.append(part.refusal or "")
        elif part.type in TEXT_TYPES:
            texts.append(part.text or "")
        elif part.type == "encrypted_content":
            continue
        else:
            raise RequestError(
                f"{path}.content[{i}] is of type {part.type[:64]!r}; this model is served for text "
                "only: send parts of type input_text",
                param=f"{path}.content[{i}].type",
            )
    return "\n".join(texts)
