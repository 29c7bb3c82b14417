"""``weft chat``: a conversation in the terminal, or one turn for each line of a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from weft.api import impl
from weft.errors import RequestError
from weft_cli.conversation import HELP, Conversation
from weft_cli.flags import ENGINE, SAMPLING, Options, with_flags
from weft_cli.help import single
from weft_cli.sampling import sampling_params

if TYPE_CHECKING:
    from weft.engine.llm import LLM
    from weft.sampling.params import SamplingParams
    from weft_cli.terminal import Screen

__all__ = ("chat", "weft_command")


@with_flags(*ENGINE, SAMPLING)
def chat(
    *,
    system: Annotated[
        str | None, typer.Option("--system", help="System message of the conversation.")
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats/--no-stats", help="Print counts and speed of each answer.")
    ] = False,
    options: Options,
) -> None:
    """Talk to a model in the terminal.

    /reset forgets the conversation, /system TEXT sets the system message, /exit or Ctrl-D leaves.
    Ctrl-C stops an answer. With piped input every line is one turn.
    """
    options.struct(SAMPLING)  # a bad value is told before the model is loaded
    engine = options.engine()
    from weft import LLM
    from weft_cli.terminal import Screen

    with LLM(**engine) as llm:
        params = sampling_params(llm, options, max_tokens=None)
        talk = Conversation(system)
        _converse(llm, params.replace(n=1, output_kind="delta"), talk, Screen(), stats)


def _converse(
    llm: LLM, params: SamplingParams, talk: Conversation, screen: Screen, stats: bool
) -> None:
    interactive = sys.stdin.isatty()
    if interactive:
        screen.note(f"{llm.config.model.model}: {HELP}")
    for line in typed_lines(screen) if interactive else piped_lines():
        reply = talk.command(line)
        if reply is not None:
            screen.note(reply)
        elif not talk.ended:
            try:
                answer(llm, params, talk, line, screen, stats)
            except RequestError as error:
                talk.forget_question()
                if not interactive:
                    raise
                screen.note(f"{error}; /reset starts again")
        if talk.ended:
            break


def answer(
    llm: LLM, params: SamplingParams, talk: Conversation, line: str, screen: Screen, stats: bool
) -> None:
    """Ask one question and keep what came, also of an answer that the user stopped."""
    from weft_cli.terminal import follow

    found = follow(llm.stream_chat(talk.ask(line), params), screen)
    screen.line()
    talk.answered(found.text)
    if found.error is not None:
        screen.note(found.error)
    elif stats or found.stopped:
        screen.note(f"({found.summary()})")


def typed_lines(screen: Screen) -> Iterator[str]:
    """Lines of a person; a backslash at the end continues on the next line. Ends with Ctrl-D."""
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() then edits lines and keeps a history)
    while True:
        try:
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


def piped_lines() -> Iterator[str]:
    for line in sys.stdin:
        if line.strip():
            yield line.strip()


@impl
def weft_command(name: str) -> typer.Typer | None:
    return single(name, chat)
