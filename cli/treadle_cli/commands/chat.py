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
from treadle_cli.help import single
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
    """Talk to a model in the terminal.

    /reset forgets the conversation, /system TEXT sets the system message, /exit or Ctrl-D leaves.
    Ctrl-C stops an answer. With piped input every line is one turn.
    """
    if explain:
        return print_engine(options.engine_config())
    options.struct(SAMPLING)  # a bad value is told before the model is loaded
    engine = options.engine()
    from treadle import LLM
    from treadle_cli.terminal import Screen

    with LLM(**engine) as llm:
        params = sampling_params(llm, options, max_tokens=None)
        talk = Conversation(system)
        partner = ChatSession(llm, params.replace(n=1, output_kind="delta"), talk, Screen(), stats)
        if sys.stdin.isatty():
            partner.converse()
        else:
            partner.read_pipe()


@dataclass(frozen=True, slots=True)
class ChatSession:
    """The model's side of a conversation."""

    llm: LLM
    params: SamplingParams
    talk: Conversation
    screen: Screen
    stats: bool

    def converse(self) -> None:
        """Talk to a person. Ctrl-C never ends the program here, whenever it comes."""
        from treadle_cli.terminal import uninterrupted

        self.screen.note(f"{self.llm.config.model.model}: {HELP}")
        with uninterrupted():
            for line in typed_lines(self.screen):
                try:
                    self.take(line)
                except RequestError as error:
                    self.talk.forget_question()
                    self.screen.note(f"{error}; /reset starts again")
                if self.talk.ended:
                    break

    def read_pipe(self) -> None:
        """Take each line as a turn. An error or Ctrl-C ends the program."""
        for line in sys.stdin:
            if line.strip() and self.take(line.strip()):
                raise KeyboardInterrupt
            if self.talk.ended:
                break

    def take(self, line: str) -> bool:
        """Carry out a command or answer a question; whether the user stopped the answer."""
        reply = self.talk.command(line)
        if reply is not None:
            self.screen.note(reply)
        elif not self.talk.ended:
            return self.answer(line)
        return False

    def answer(self, line: str) -> bool:
        """Ask one question and keep what came, also of an answer that the user stopped."""
        from treadle_cli.terminal import follow

        found = follow(self.llm.stream_chat(self.talk.ask(line), self.params), self.screen)
        self.screen.line()
        self.talk.answered(found.text)
        if found.error is not None:
            self.screen.note(found.error)
        elif self.stats or found.stopped:
            self.screen.note(f"({found.summary()})")
        return found.stopped


def typed_lines(screen: Screen) -> Iterator[str]:
    """Lines of a person; a backslash at the end continues on the next line. Ends with Ctrl-D."""
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
    return single(name, chat) if name == "chat" else None
