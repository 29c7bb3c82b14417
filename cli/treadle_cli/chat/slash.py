"""The commands of a chat, such as ``/set temperature 0``: one table for running, help and Tab."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from treadle.errors import ConfigError, RequestError
from treadle_cli.chat.display import Reasoning
from treadle_cli.chat.settings import NAMES

if TYPE_CHECKING:
    from treadle_cli.chat.session import ChatSession

__all__ = ("COMMANDS", "completions", "find_command", "help_text")

Run = Callable[["ChatSession", str], str | None]


@dataclass(frozen=True, slots=True)
class Command:
    """``run`` takes what follows the name and returns the text to show, if any."""

    name: str
    usage: str
    help: str
    run: Run
    aliases: Sequence[str] = ()


def set_parameter(session: ChatSession, rest: str) -> str:
    name, _, text = rest.partition(" ")
    return session.settings.set(name, text.strip()) if name else "\n".join(session.settings.lines())


def show_or_set_system(session: ChatSession, rest: str) -> str:
    if rest:
        session.conversation.system = None if rest == "none" else rest
    return f"(system message: {session.conversation.system or 'none'})"


def switch_model(session: ChatSession, rest: str) -> str:
    if not rest:
        others = [name for name in session.model.names() if name != session.model.name]
        return "\n".join([f"{session.model.name} (in use)", *others])
    with session.waiting(f"loading {rest}"):
        session.model.switch(rest)
    session.settings.use_defaults(session.model.defaults())
    return f"(now {session.model.name})"


def set_reasoning(session: ChatSession, rest: str) -> str:
    choices = get_args(Reasoning)
    if rest:
        if rest not in choices:
            raise RequestError(f"/reasoning is {rest!r}; it takes {', '.join(choices)}")
        session.reasoning = rest  # type: ignore[assignment]
    return f"(reasoning: {session.reasoning})"


def clear(session: ChatSession, rest: str) -> str:
    session.conversation.turns.clear()
    return "(forgotten)"


def undo(session: ChatSession, rest: str) -> str:
    question = session.conversation.undo()
    if question is None:
        return "(there is nothing to take back)"
    return f"(took back: {textwrap.shorten(question, 60, placeholder=' …') or '…'})"


def retry(session: ChatSession, rest: str) -> str | None:
    question = session.conversation.undo()
    if question is None:
        return "(there is no question to ask again)"
    session.answer(question)
    return None


def save(session: ChatSession, rest: str, replace: bool = False) -> str:
    path = file_of(rest, "/save")
    replace = replace or path == session.file
    conversation = session.conversation
    conversation.save(path, session.model.name, session.settings.changes, replace)
    session.file = path
    return f"(saved {len(conversation.turns)} messages to {path})"


def load(session: ChatSession, rest: str) -> str:
    path = file_of(rest, "/load")
    before = (session.conversation.system, session.conversation.turns)
    chat = session.conversation.load(path)
    try:
        session.settings.replace(chat.sampling)
    except RequestError:
        session.conversation.system, session.conversation.turns = before
        raise
    session.file = path
    line = f"(loaded {len(session.conversation.turns)} messages from {path}"
    if chat.model and chat.model != session.model.name:
        line += f"; they were with {chat.model}"
    return line + ")"


def leave(session: ChatSession, rest: str) -> None:
    session.is_finished = True


def show_help(session: ChatSession, rest: str) -> str:
    return help_text(session.columns)


def file_of(text: str, command: str) -> Path:
    if not text:
        raise ConfigError(f"{command} needs the name of a file, such as {command} chat.json")
    return Path(text).expanduser().absolute()


COMMANDS = (
    Command("/help", "/help", "Show this.", show_help, ("/?",)),
    Command(
        "/set",
        "/set [NAME [VALUE]]",
        "Show or change a sampling parameter; the value default takes a change back.",
        set_parameter,
    ),
    Command(
        "/system",
        "/system [TEXT]",
        "Show or change the system message; none removes it.",
        show_or_set_system,
    ),
    Command("/model", "/model [NAME]", "Show the models, or use another one.", switch_model),
    Command(
        "/reasoning",
        "/reasoning [show|fold|hide]",
        "Say how reasoning is shown.",
        set_reasoning,
    ),
    Command("/undo", "/undo", "Take back the last question and its answer.", undo),
    Command("/retry", "/retry", "Ask the last question again.", retry),
    Command("/clear", "/clear", "Forget the conversation.", clear, ("/reset",)),
    Command(
        "/save",
        "/save FILE",
        "Write the conversation as JSON; /save! replaces a file.",
        save,
    ),
    Command("/save!", "", "", lambda session, rest: save(session, rest, replace=True)),
    Command("/load", "/load FILE", "Continue a saved conversation.", load),
    Command("/quit", "/quit", "Leave; so does Ctrl-D.", leave, ("/exit", "/bye")),
)
BY_NAME = {name: c for c in COMMANDS for name in (c.name, *c.aliases)}

KEYS = (
    ('"""', "A block of several lines ends with the next three quotes."),
    ("\\ or Alt-Enter", "At the end of a line: continue on the next one."),
    ("Ctrl-C", "Stop an answer, or drop the line."),
)


def find_command(text: str) -> tuple[Command, str] | None:
    """Return the command of a message and its argument, ``None`` for a question.

    A path such as ``/usr/bin`` is a question. Raises ``RequestError`` for a misspelt command.
    """
    word, _, rest = text.partition(" ")
    if word in BY_NAME:
        return BY_NAME[word], rest.strip()
    if word.startswith("/") and "/" not in word[1:] and "\n" not in text and len(word) > 1:
        raise RequestError(f"there is no command {word}; /help lists them")
    return None


def help_text(columns: int) -> str:
    """The commands and keys: in two columns, or below each other on a narrow terminal."""
    rows = [(c.usage, c.help) for c in COMMANDS if c.usage] + list(KEYS)
    widest = max(len(usage) for usage, _ in rows) + 2
    lines: list[str] = []
    for usage, text in rows:
        if columns >= widest + 40:
            start, hanging = usage.ljust(widest), " " * widest
        else:
            lines.append(usage)
            start = hanging = "    "
        lines += textwrap.wrap(
            text, max(20, columns - 1), initial_indent=start, subsequent_indent=hanging
        )
    return "\n".join(lines)


def completions(session: ChatSession, line: str) -> Sequence[str]:
    """The words that may stand at the end of ``line``."""
    words = line.split(" ")
    if len(words) == 1:
        return [name for name in BY_NAME if len(name) > 2]
    match BY_NAME[words[0]].name if words[0] in BY_NAME else "":
        case "/set" if len(words) == 2:
            return NAMES
        case "/model":
            return session.model.known_names
        case "/reasoning":
            return get_args(Reasoning)
        case "/save" | "/save!" | "/load":
            return list(files_like(words[-1]))
    return []


def files_like(text: str) -> Iterator[str]:
    """The paths that begin with ``text``; folders end with a slash."""
    folder, slash, _ = text.rpartition("/")
    place = Path(folder + slash).expanduser() if text else Path()
    try:
        for path in sorted(place.iterdir()):
            yield folder + slash + path.name + ("/" if path.is_dir() else "")
    except OSError:
        return
