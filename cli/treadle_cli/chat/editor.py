"""The line editor of a chat: several lines, pasted blocks, history, completion of commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from treadle_cli.chat.blocks import is_open, plain_text
from treadle_cli.terminal import Screen, interruptible

if TYPE_CHECKING:
    from treadle_cli.chat.history import FileHistory

__all__ = ("Editor",)

Complete = Callable[[str], Sequence[str]]
"""From a line up to the cursor to the words that may follow its last space."""


class LineCompleter(Completer):
    """Asks ``complete`` when Tab is pressed on the first line."""

    def __init__(self, complete: Complete) -> None:
        self._complete = complete

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        text = document.text_before_cursor
        if text.startswith("/") and "\n" not in text:
            word = text.rpartition(" ")[2]
            for candidate in self._complete(text):
                if candidate.startswith(word):
                    yield Completion(candidate, start_position=-len(word))


class Editor:
    """Reads messages at a terminal. Enter sends one, except inside a block of three quotes."""

    def __init__(self, screen: Screen, history: FileHistory | None, complete: Complete) -> None:
        self._screen = screen
        kept: History = history if history is not None else InMemoryHistory()
        self._session: PromptSession[str] = PromptSession(
            history=kept,
            multiline=True,
            key_bindings=key_bindings(),
            completer=LineCompleter(complete),
            complete_while_typing=False,
            prompt_continuation=". ",
        )

    def messages(self) -> Iterator[str]:
        """Yield what is typed, until Ctrl-D. Ctrl-C drops the line."""
        while True:
            try:
                text = self._read("> ")
            except EOFError:
                return
            except KeyboardInterrupt:
                self._screen.note("/quit or Ctrl-D leaves")
                continue
            if text.strip():
                yield plain_text(text)

    def ask(self, prompt: str) -> str:
        """Read one message. Raises ``EOFError`` or ``KeyboardInterrupt``."""
        return plain_text(self._read(prompt))

    def _read(self, prompt: str) -> str:
        with interruptible():
            return self._session.prompt(prompt)


def key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        """Send the message, or continue it on a new line."""
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        elif buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    @bindings.add("c-j")
    def _(event: KeyPressEvent) -> None:
        """Alt-Enter and Ctrl-J: a new line anywhere."""
        event.current_buffer.insert_text("\n")

    return bindings
