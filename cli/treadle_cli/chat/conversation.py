"""The messages of a chat, and the file that keeps them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from treadle.errors import ConfigError
from treadle.outputs import ToolCall
from treadle.regular_files import read_regular

__all__ = ("Conversation", "SavedChat")

Message = dict[str, Any]

MAX_FILE_BYTES = 64 * 2**20


class SavedMessage(msgspec.Struct, omit_defaults=True):
    """One message in the form of the OpenAI API, with what a reasoning model thought."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class SavedChat(msgspec.Struct, omit_defaults=True):
    """The file of ``/save``. Of another program's file, ``messages`` are enough."""

    messages: list[SavedMessage]
    model: str | None = None
    sampling: dict[str, Any] = {}


class Conversation:
    """A system message, if any, followed by questions and answers."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[Message] = []

    def messages(self) -> list[Message]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.turns]

    def add_question(self, text: str) -> list[Message]:
        """Add a question and return all messages."""
        self.turns.append({"role": "user", "content": text})
        return self.messages()

    def add_answer(self, text: str, reasoning: str = "", calls: Sequence[ToolCall] = ()) -> None:
        answer: Message = {"role": "assistant", "content": text}
        if reasoning:
            answer["reasoning_content"] = reasoning
        if calls:
            answer["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        self.turns.append(answer)

    def add_result(self, call_id: str, text: str) -> None:
        """Add what a tool returned."""
        self.turns.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def undo(self) -> str | None:
        """Remove the last question and what followed. Return it, ``None`` if there is none."""
        while self.turns:
            message = self.turns.pop()
            if message["role"] == "user":
                content = message["content"]
                return content if isinstance(content, str) else "(parts)"
        return None

    def save(self, path: Path, model: str, sampling: Mapping[str, Any], replace: bool) -> None:
        """Write the conversation, for this user's eyes only. Raises ``ConfigError``."""
        chat = {"model": model, "sampling": dict(sampling), "messages": self.messages()}
        content = msgspec.json.format(msgspec.json.encode(chat)) + b"\n"
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            if path.exists() and not replace:
                raise ConfigError(f"{path} exists; choose another name, or /save! {path}")
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
                os.replace(draft, path)
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error

    def load(self, path: Path) -> SavedChat:
        """Take over the messages of a file. Raises ``ConfigError`` and changes nothing then."""
        try:
            content = read_regular(path, MAX_FILE_BYTES)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
        try:
            bare = content.lstrip().startswith(b"[")
            chat = (
                SavedChat(msgspec.json.decode(content, type=list[SavedMessage]))
                if bare
                else msgspec.json.decode(content, type=SavedChat)
            )
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not a conversation: {error}") from error
        messages: list[Message] = msgspec.to_builtins(chat.messages)
        system = None
        if messages and messages[0]["role"] == "system":
            content_of_system = messages.pop(0).get("content")
            if not isinstance(content_of_system, str | None):
                raise ConfigError(f"{path}: the system message is not text")
            system = content_of_system
        for message in messages:
            message.setdefault("content", None if "tool_calls" in message else "")
        self.system, self.turns = system, messages
        return chat
