"""Chat templates: Jinja in a sandbox, with the globals and filters that published templates expect.

The meaning is that of transformers' ``apply_chat_template``. A template comes from a checkpoint or
the operator, never from a request; it sees plain JSON values only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from treadle.errors import CheckpointError, RequestError
from treadle_jinja.marker_escaping import NONCHARACTERS

__all__ = ("ChatTemplate",)

# More than any context holds, less than what would hurt the process.
MAX_PROMPT_LEN = 32 * 2**20


class _Generation(Extension):
    """``{% generation %}`` marks what a model is trained on; for rendering it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """A ``namespace()`` that holds no names of Python's own."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a template may not set {name!r} on a namespace")
        super().__setitem__(name, value)


class Renders(Protocol):
    """Renders templates somewhere else; see ``isolation``."""

    def render(self, source: str, variables: Mapping[str, Any]) -> str: ...
    def start(self) -> None: ...
    def close(self) -> None: ...


class ChatTemplate:
    """One template. Rendering keeps no state, so threads may share it."""

    def __init__(
        self, source: str, name: str = "chat template", isolated: Renders | None = None
    ) -> None:
        """With ``isolated`` the template is parsed here and neither compiled nor run.

        Raises ``CheckpointError`` if ``source`` is not a template.
        """
        self.source = source
        self._isolated = isolated
        self._template: jinja2.Template | None = None
        try:
            env = _environment()
            tree = env.parse(source)
            if isolated is None:
                self._template = env.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            location = f" (line {line})" if line else ""
            raise CheckpointError(f"the {name} is not valid Jinja{location}: {error}") from error
        data = [node.data for node in tree.find_all(nodes.TemplateData)]
        constants = [
            node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)
        ]
        # What the template itself may write. NUL keeps pieces from joining into something else.
        self.literals = "\0".join([*data, *constants])

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises ``RequestError``: a template refuses what it was not written for."""
        if self._template is None:
            if self._isolated is None:
                raise CheckpointError("a chat template has nowhere to run")
            return self._isolated.render(self.source, variables)
        chunks: list[str] = []
        size = 0
        try:
            for chunk in self._template.generate(**variables):
                chunks.append(chunk)
                size += len(chunk)
                if size > MAX_PROMPT_LEN:
                    break
        except Exception as error:  # a template may fail in any way that Python can
            raise RequestError(
                f"the chat template refused the conversation: {str(error) or type(error).__name__}",
                param="messages",
            ) from error
        if size > MAX_PROMPT_LEN:
            raise RequestError(
                f"the chat template wrote more than {MAX_PROMPT_LEN} characters; send less text",
                param="messages",
            )
        return "".join(chunks)


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    env.filters["tojson"] = _tojson
    extra: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "namespace": _namespace,
        # dict itself would give templates a class to climb from
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
    }
    env.globals.update(extra)
    return env


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _namespace(*args: Any, **values: Any) -> Namespace:
    space = _PlainNamespace()
    for name, value in dict(*args, **values).items():
        space[name] = value
    return space


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: Jinja's own filter escapes HTML."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    # The breaks of ``literals`` must survive: they are taken out after rendering.
    return re.sub(r"[^\x00-\x7f]", _escaped, text) if ensure_ascii else text


def _escaped(match: re.Match[str]) -> str:
    char = match.group()
    return char if char in NONCHARACTERS else json.dumps(char)[1:-1]
