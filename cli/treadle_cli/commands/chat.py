"""``treadle chat``: a conversation in the terminal, or one turn for each line of a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from treadle.api import impl
from treadle.errors import RequestError
from treadle_cli.conversation import HELP, Conversation
from treadle_cli.explain import Flag, print_engine
from treadle_cli.flags import ENGINE, SAMPLING, Options, with_flags
from treadle_cli.help import single_command
from treadle_cli.sampling import sampling_params

if TYPE_CHECKING:
    from treadle.api.sampling_params import SamplingParams
    from treadle.entrypoints.llm import LLM
    from treadle_cli.terminal import Screen

__all__ = ("chat", "treadle_command")


@with_flags(*ENGINE, SAMPLING)
def chat(
    *,
    system: Annotated[
        str | None, typer.Option("--system", help="System message of the conversation.")
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats/--no-stats", help="Print counts and speed of each answer.")
    ] = False,
    explain: Flag = False,
    options: Options,
) -> None:
    """Chat with a model in the terminal.

    /reset forgets the conversation, /system TEXT sets the system message, /exit or Ctrl-D leaves.
    Ctrl-C stops an answer. With piped input every line is one turn.
    """
    if explain:
        return print_engine(options.engine_config())
    options.struct(SAMPLING)  # a bad value is reported before the model is loaded
    engine = options.engine()
    from treadle import LLM
    from treadle_cli.terminal import Screen

    with LLM(**engine) as llm:
        params = sampling_params(llm, options, max_tokens=None)
        conversation = Conversation(system)
        session = ChatSession(
            llm, params.replace(n=1, output_kind="delta"), conversation, Screen(), stats
        )
        if sys.stdin.isatty():
            session.converse()
        else:
            session.read_pipe()


@dataclass(frozen=True, slots=True)
class ChatSession:
    """A conversation with a model on a screen."""

    llm: LLM
    params: SamplingParams
    conversation: Conversation
    screen: Screen
    stats: bool

    def converse(self) -> None:
        """Answer lines typed at the terminal. Ctrl-C stops an answer and never ends the program."""
        from treadle_cli.terminal import uninterrupted

        self.screen.note(f"{self.llm.config.model.model}: {HELP}")
        with uninterrupted():
            for line in typed_lines(self.screen):
                try:
                    self.handle_line(line)
                except RequestError as error:
                    self.conversation.drop_question()
                    self.screen.note(f"{error}; /reset starts again")
                if self.conversation.is_finished:
                    break

    def read_pipe(self) -> None:
        """Answer each line of a pipe. An error or Ctrl-C ends the program."""
        for line in sys.stdin:
            if line.strip() and self.handle_line(line.strip()):
                raise KeyboardInterrupt
            if self.conversation.is_finished:
                break

    def handle_line(self, line: str) -> bool:
        """Run a command or answer a question. Return whether the user stopped the answer."""
        reply = self.conversation.command(line)
        if reply is not None:
            self.screen.note(reply)
        elif not self.conversation.is_finished:
            return self.answer(line)
        return False

    def answer(self, line: str) -> bool:
        """Send one question and keep the answer, even one that the user stopped."""
        from treadle_cli.terminal import follow

        result = follow(
            self.llm.stream_chat(self.conversation.add_question(line), self.params), self.screen
        )
        self.screen.line()
        self.conversation.add_answer(result.text)
        if result.error is not None:
            self.screen.note(result.error)
        elif self.stats or result.stopped:
            self.screen.note(f"({result.summary()})")
        return result.stopped


def typed_lines(screen: Screen) -> Iterator[str]:
    """Yield the typed lines; a backslash at the end continues on the next one. Ctrl-D ends."""
    import contextlib

    from treadle_cli.terminal import interruptible

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() then edits lines and keeps a history)
    while True:
        try:
            with interruptible():
                line = input("> ")
                while line.endswith("\\"):
                    line = line[:-1] + "\n" + input(". ")
        except EOFError:
            screen.line()
            return
        except KeyboardInterrupt:
            screen.line()
            screen.note("/exit or Ctrl-D leaves")
            continue
        if line.strip():
            yield line.strip()


@impl
def treadle_command(name: str) -> typer.Typer | None:
    return single_command(name, chat) if name == "chat" else None
