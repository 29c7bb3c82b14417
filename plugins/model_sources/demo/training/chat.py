"""What a training sample is, and how it becomes text.

``segments`` must give the text that ``chat_template.jinja`` gives; it exists beside the template
because it is many times faster and knows which parts the model is trained to write.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

__all__ = ("Chat", "Text", "Turn", "prompt_text", "segments")

TOOLS_HEAD = "You can call these tools, given as one JSON object per line:\n<tools>\n"
TOOLS_TAIL = (
    "\n</tools>\nTo call a tool, answer with\n<tool_call>\n"
    '{"name": "tool name", "arguments": {"argument": "value"}}\n</tool_call>'
)
THINK_LINE = "Think before you answer."


@dataclass(slots=True)
class Turn:
    """A question and its answer; ``thought`` is the reasoning that leads there."""

    user: str
    answer: str
    thought: str = ""
    key: str = ""


@dataclass(slots=True)
class Chat:
    """Messages as in the OpenAI API, with three marks for training.

    ``train`` false: the model does not learn this reply. ``asked``: the user asked for reasoning,
    so it is shown although the template was not told to. ``closed``: the template has written an
    empty thought, as for ``enable_thinking=False``.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    thinking: bool | None = None  # the template's enable_thinking
    kind: str = ""


@dataclass(slots=True)
class Text:
    """Plain text without a chat around it."""

    text: str
    kind: str = "text"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _system(chat: Chat) -> str:
    parts = []
    if chat.messages and chat.messages[0]["role"] == "system":
        parts.append(chat.messages[0]["content"])
    if chat.tools:
        parts.append(TOOLS_HEAD + "\n".join(_dump(t) for t in chat.tools) + TOOLS_TAIL)
    if chat.thinking:
        parts.append(THINK_LINE)
    return "<|im_start|>system\n" + "\n\n".join(parts) + "<|im_end|>\n" if parts else ""


def _assistant(message: dict[str, Any], *, keep_thought: bool) -> str:
    text = message.get("content") or ""
    calls = message.get("tool_calls") or []
    for i, call in enumerate(calls):
        f = call["function"]
        arguments = f["arguments"] if isinstance(f["arguments"], str) else _dump(f["arguments"])
        text += "\n" if i or text else ""
        text += f'<tool_call>\n{{"name": "{f["name"]}", "arguments": {arguments}}}\n</tool_call>'
    thought = message.get("reasoning_content")
    if thought and keep_thought:
        text = f"<think>\n{thought}\n</think>\n\n{text}"
    return text


def segments(chat: Chat) -> list[tuple[str, bool | None]]:
    """Text in order, each with whether the model is trained to write it; None for not at all."""
    out: list[tuple[str, bool | None]] = []
    text = _system(chat)
    turns = [m for m in chat.messages if m["role"] != "system"]
    last_query = max((i for i, m in enumerate(turns) if m["role"] == "user"), default=-1)
    for i, m in enumerate(turns):
        if m["role"] == "user":
            text += f"<|im_start|>user\n{m['content']}<|im_end|>\n"
        elif m["role"] == "tool":
            first = i == 0 or turns[i - 1]["role"] != "tool"
            last = i + 1 == len(turns) or turns[i + 1]["role"] != "tool"
            text += "<|im_start|>user" if first else ""
            text += f"\n<tool_response>\n{m['content']}\n</tool_response>"
            text += "<|im_end|>\n" if last else ""
        else:
            text += "<|im_start|>assistant\n"
            out.append((text, False))
            if m.get(
                "closed"
            ):  # the template writes this for enable_thinking=False, the model must not
                out.append(("<think>\n\n</think>\n\n", None))
            shown = i > last_query and bool(chat.thinking or m.get("asked"))
            reply = _assistant(m, keep_thought=shown) + "<|im_end|>"
            out.append((reply, bool(m.get("train", True))))
            text = "\n"
    return out


def prompt_text(chat: Chat) -> str:
    """The prompt for the next assistant message, with the generation prompt."""
    probe = Chat(
        [*chat.messages, {"role": "assistant", "content": "", "closed": chat.thinking is False}],
        chat.tools,
        chat.thinking,
    )
    return "".join(text for text, _ in segments(probe)[:-1])
