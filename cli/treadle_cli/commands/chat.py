"""``treadle chat``: a conversation in the terminal, or one turn for each line of a pipe."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from treadle.api import impl
from treadle.errors import ConfigError
from treadle_cli.explain import Flag, print_engine
from treadle_cli.flags import ENGINE, SAMPLING, Options, with_flags
from treadle_cli.flags.server import ApiKey, first_key
from treadle_cli.help import single_command

if TYPE_CHECKING:
    from treadle_cli.chat.models import ChatModel
    from treadle_cli.terminal import Screen

__all__ = ("chat", "treadle_command")


@with_flags(*ENGINE, SAMPLING)
def chat(
    *,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", help="Chat with this OpenAI-compatible server instead of loading a model."
        ),
    ] = None,
    api_key: ApiKey = None,
    system: Annotated[
        str | None, typer.Option("--system", help="System message of the conversation.")
    ] = None,
    load: Annotated[
        Path | None, typer.Option("--load", help="Continue a conversation that /save wrote.")
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            "--tools",
            help="JSON file with a list of tools. The next message after a call is its result.",
        ),
    ] = None,
    reasoning: Annotated[
        Literal["show", "fold", "hide"] | None,
        typer.Option(
            "--reasoning",
            help="How reasoning appears (default: show on a terminal, hide in a pipe).",
            show_default=False,
        ),
    ] = None,
    history: Annotated[
        bool, typer.Option("--history/--no-history", help="Keep what is typed for later chats.")
    ] = True,
    stats: Annotated[
        bool, typer.Option("--stats/--no-stats", help="Print counts and speed of each answer.")
    ] = False,
    explain: Flag = False,
    options: Options,
) -> None:
    """Chat with a model in the terminal, here or on a server.

    /help lists the commands of a chat. Ctrl-C stops an answer, Ctrl-D leaves. With piped input every
    line is one turn.
    """
    if explain:
        return print_engine(options.engine_config())
    from treadle_cli.chat.conversation import Conversation
    from treadle_cli.chat.session import ChatSession
    from treadle_cli.chat.settings import Settings
    from treadle_cli.terminal import Screen

    changes = options.of([SAMPLING])
    options.struct(SAMPLING)  # a bad value is reported before the model is loaded
    tool_list = None if tools is None else read_tools(tools)
    screen, is_typed = Screen(), sys.stdin.isatty()
    with closing(_model(options, url, first_key(api_key), screen)) as model:
        session = ChatSession(
            model,
            Settings(model.defaults(), changes),
            Conversation(system),
            screen,
            stats=stats,
            reasoning=reasoning or ("show" if screen.interactive else "hide"),
            tools=tool_list,
        )
        if load is not None:
            session.handle(f"/load {load}")
        if is_typed:
            session.converse(history)
        else:
            session.read_pipe(sys.stdin)


def _model(options: Options, url: str | None, api_key: str | None, screen: Screen) -> ChatModel:
    """Connect to the server, or load the model."""
    from treadle_cli.chat.models import LocalModel, RemoteModel

    if url is None:
        engine = options.engine()
        if screen.animated:
            screen.note(f"loading {options.engine_config().model.model} …")
        return LocalModel(engine)
    if others := sorted(options.of(ENGINE).keys() - {"model"}):
        flag = "--" + others[0].replace("_", "-")
        raise ConfigError(f"{flag} is of an engine, and --url chats with a server that has its own")
    from treadle_cli.client import Server

    return RemoteModel(Server(url, api_key), options.values.get("model"))


def read_tools(path: Path) -> Sequence[Mapping[str, Any]]:
    """Read a list of tools in the form of the OpenAI API. Raises ``ConfigError``."""
    import msgspec

    from treadle.regular_files import read_regular

    try:
        return msgspec.json.decode(read_regular(path), type=list[dict[str, Any]])
    except OSError as error:
        raise ConfigError(f"--tools {path} cannot be read: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--tools {path} is not a list of tools: {error}") from error


@impl
def treadle_command(name: str) -> typer.Typer | None:
    return single_command(name, chat) if name == "chat" else None
