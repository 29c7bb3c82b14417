"""A conversation with a model on a screen."""

from __future__ import annotations

import contextlib
import sys
import termios
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle.errors import EngineDeadError, TreadleError
from treadle.outputs import ToolCall
from treadle_cli.chat.blocks import joined_lines
from treadle_cli.chat.conversation import Conversation
from treadle_cli.chat.display import Reasoning, follow
from treadle_cli.chat.models import ChatModel
from treadle_cli.chat.settings import Settings
from treadle_cli.chat.slash import completions, find_command
from treadle_cli.terminal import Screen, Spinner, uninterrupted
from treadle_cli.terminal.screen import columns

__all__ = ("ChatSession",)

BRACKETED_PASTE = "\x1b[?2004"


class ChatSession:
    """Reads messages, runs commands and shows answers."""

    def __init__(
        self,
        model: ChatModel,
        settings: Settings,
        conversation: Conversation,
        screen: Screen,
        *,
        stats: bool = False,
        reasoning: Reasoning = "show",
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.model, self.settings, self.conversation = model, settings, conversation
        self.screen, self.stats, self.reasoning, self.tools = screen, stats, reasoning, tools
        self.file: Path | None = None
        """The last file that was saved or loaded: saving to it again needs no question."""
        self.is_finished = False
        self._results: Iterator[str] = iter(())

    @property
    def columns(self) -> int:
        return columns(self.screen.out)

    def converse(self, keep_history: bool) -> None:
        """Answer what is typed at the terminal. Ctrl-C stops an answer and never ends the program."""
        from treadle_cli.chat.editor import Editor
        from treadle_cli.chat.history import FileHistory, history_path

        history = FileHistory(history_path()) if keep_history else None
        editor = Editor(self.screen, history, self._completions)
        self.screen.note(f"{self.model.name}: /help lists commands, Ctrl-D leaves")
        self._results = typed_results(editor)
        with uninterrupted():
            for text in editor.messages():
                try:
                    with quiet_keyboard(self.screen):
                        self.handle(text)
                except TreadleError as error:
                    if isinstance(error, EngineDeadError):
                        raise
                    self.screen.note(str(error))
                if self.is_finished:
                    return
        self.screen.line()

    def read_pipe(self, lines: Iterable[str]) -> None:
        """Answer each message of a pipe. An error or Ctrl-C ends the program."""
        messages = self._results = joined_lines(lines)
        for text in messages:
            if self.handle(text):
                raise KeyboardInterrupt
            if self.is_finished:
                return

    def handle(self, text: str) -> bool:
        """Run a command or answer a question. Return whether the user stopped the answer."""
        command = find_command(text)
        if command is None:
            return self.answer(text)
        shown = command[0].run(self, command[1])
        if shown is not None:
            self.screen.note(shown)
        return False

    def answer(self, text: str) -> bool:
        """Send one question and keep the answer, even one that the user stopped.

        After a failure the conversation is what it was before.
        """
        turns = list(self.conversation.turns)
        self.conversation.add_question(text)
        try:
            stopped, calls = self._answer_once()
            while calls and not stopped:
                self._add_results(calls)
                stopped, calls = self._answer_once()
        except BaseException:
            self.conversation.turns = turns
            raise
        return stopped

    def _answer_once(self) -> tuple[bool, list[ToolCall]]:
        messages = self.conversation.messages()
        updates = self.model.stream(messages, self.settings, self.tools)
        reply = follow(updates, self.screen, self.reasoning)
        self.conversation.add_answer(reply.content, reply.reasoning, reply.calls)
        if reply.figures.error is not None:
            self.screen.note(reply.figures.error)
        elif self.stats or reply.figures.stopped:
            self.screen.note(f"({reply.figures.summary()})")
        return reply.figures.stopped, reply.calls

    def _add_results(self, calls: Sequence[ToolCall]) -> None:
        """Ask the user, or the pipe, what the tools returned; nothing means an empty result."""
        for call in calls:
            if self.screen.animated:
                self.screen.note(f"what does {call.name} return?")
            self.conversation.add_result(call.id or "", next(self._results, ""))

    def _completions(self, line: str) -> Sequence[str]:
        try:
            return completions(self, line)
        except TreadleError:  # a server that cannot be reached has no names
            return []

    @contextlib.contextmanager
    def waiting(self, label: str) -> Iterator[None]:
        """Show that something takes time."""
        spinner = Spinner(self.screen)
        spinner.start(lambda: label)
        try:
            yield
        finally:
            spinner.stop()


def typed_results(editor: Any) -> Iterator[str]:
    """Yield what is typed for the result of each call; Ctrl-C and Ctrl-D leave it empty."""
    while True:
        try:
            yield editor.ask("= ")
        except (EOFError, KeyboardInterrupt):
            yield ""


@contextlib.contextmanager
def quiet_keyboard(screen: Screen) -> Iterator[None]:
    """Do not echo what is typed during an answer: it would stand in the middle of the text.

    It is not lost: the editor reads it afterwards, so lines and pasted blocks must arrive as they do
    there. Ctrl-C still is a signal.
    """
    if not screen.animated:
        yield
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    quiet = list(before)
    quiet[0] &= ~termios.ICRNL
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(file, termios.TCSADRAIN, quiet)
    screen.raw(BRACKETED_PASTE + "h")
    try:
        yield
    finally:
        screen.raw(BRACKETED_PASTE + "l")
        termios.tcsetattr(file, termios.TCSADRAIN, before)
