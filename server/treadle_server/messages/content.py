"""From the blocks of messages to the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.errors import RequestError
from treadle_server.messages.request import ContentBlock, MessagesRequest
from treadle_server.wire.messages import (
    AssistantMessage,
    CalledFunction,
    Message,
    MessageToolCall,
    SystemMessage,
    ToolMessage,
    UserMessage,
)

__all__ = ("MAX_BLOCKS", "to_messages")

MAX_BLOCKS = 16_384
BILLING = "x-anthropic-billing-header:"
"""The beginning of a block of Claude Code that changes with each request and says nothing to a
model: with it, no two prompts would share a prefix."""
DROPPED = frozenset({"redacted_thinking", "server_tool_use"})
Blocks = str | Sequence[ContentBlock] | None


def to_messages(request: MessagesRequest) -> list[Message]:
    """Return the messages of a request, its system prompt first. Raises ``RequestError``."""
    contents = [m.content for m in request.messages]
    num_blocks = sum(len(content) for content in contents if not isinstance(content, str))
    if num_blocks > MAX_BLOCKS:
        raise RequestError(
            f"messages have {num_blocks} blocks; at most {MAX_BLOCKS} are allowed", param="messages"
        )
    messages: list[Message] = []
    if system := system_text(request.system):
        messages.append(SystemMessage(content=system))
    for i, message in enumerate(request.messages):
        path = f"messages[{i}].content"
        match message.role:
            case "system":
                messages.append(SystemMessage(content=text_of(message.content, path)))
            case "user":
                messages += user_messages(message.content, path)
            case "assistant":
                messages.append(assistant_message(message.content, path))
    last = messages[-1] if messages else None
    if isinstance(last, AssistantMessage) and not last.tool_calls and not last.content:
        messages.pop()  # an empty beginning of the answer
    return messages


def system_text(system: Blocks) -> str:
    if isinstance(system, str | None):
        return system or ""
    blocks = [block for block in system if not (block.text or "").startswith(BILLING)]
    return text_of(blocks, "system")


def user_messages(content: Blocks, path: str) -> list[Message]:
    """Return a message for each result of a tool, and one for the texts between them."""
    if isinstance(content, str | None):
        return [UserMessage(content=content or "")]
    messages: list[Message] = []
    texts: list[ContentBlock] = []
    for i, block in enumerate(content):
        if block.type != "tool_result":
            texts.append(block)
            continue
        if texts:
            messages.append(UserMessage(content=text_of(texts, path)))
            texts = []
        result = text_of(block.content, f"{path}[{i}].content")
        if block.is_error:
            result = f"Error: {result}"
        messages.append(ToolMessage(content=result, tool_call_id=block.tool_use_id))
    if texts or not messages:
        messages.append(UserMessage(content=text_of(texts, path)))
    return messages


def assistant_message(content: Blocks, path: str) -> AssistantMessage:
    if isinstance(content, str | None):
        return AssistantMessage(content=content or "")
    turn = AssistantMessage()
    texts: list[ContentBlock] = []
    thoughts: list[str] = []
    calls: list[MessageToolCall] = []
    for i, block in enumerate(content):
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            if not block.name:
                raise RequestError(f"{path}[{i}] has no name", param=f"{path}[{i}].name")
            function = CalledFunction(name=block.name, arguments=block.input or {})
            calls.append(MessageToolCall(id=block.id, function=function))
        else:
            texts.append(block)
    turn.content = text_of(texts, path) or None
    turn.reasoning = "\n".join(thoughts) or None
    turn.tool_calls = calls or None
    return turn


def text_of(content: Blocks, path: str) -> str:
    """Return the text of blocks. Raises ``RequestError`` for a block that is no text."""
    if isinstance(content, str | None):
        return content or ""
    texts = []
    for i, block in enumerate(content):
        if block.type in DROPPED or block.type.endswith("_tool_result"):
            continue
        texts.append(block_text(block, f"{path}[{i}]"))
    return "\n".join(texts)


def block_text(block: ContentBlock, path: str) -> str:
    match block.type:
        case "text":
            return block.text or ""
        case "document" if is_text(block):
            source = block.source
            inner = source.data if source is not None and not isinstance(source, str) else None
            return "\n".join(filter(None, (block.title, inner, text_of(block.content, path))))
        case "search_result":
            return "\n".join(filter(None, (block.title, text_of(block.content, path))))
        case "tool_reference":
            return block.name or ""
    raise RequestError(
        f"{path} is of type {block.type[:64]!r}, which is not served here: this model reads text "
        "only, send blocks of type text",
        param=path,
    )


def is_text(block: ContentBlock) -> bool:
    source = block.source
    return source is not None and not isinstance(source, str) and source.type == "text"
