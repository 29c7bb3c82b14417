"""Flags that the parser of the command line does not know, rewritten to flags that it knows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from treadle.option_names import OptionName, answers_to, translate

__all__ = ("FLAG", "PREFIX", "rewrite_flags", "translate_flags")

PREFIX = "--plugin."
FLAG = "--plugin-option"
OPTIMIZATION = "-O"
NEGATION = "no_"
NUMBER = re.compile(r"-\d")


def rewrite_flags(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with ``--plugin.K.K.o=v`` and ``--plugin.K.K.o v`` as
    ``--plugin-option K.K.o=v``."""
    return list(_rewritten(iter(arguments)))


def _rewritten(arguments: Iterator[str]) -> Iterator[str]:
    for argument in arguments:
        if argument == "--":
            yield argument
            yield from arguments
        elif argument.startswith(PREFIX):
            name = argument.removeprefix(PREFIX)
            if "=" not in name:
                following = next(arguments, None)
                name = name if following is None else f"{name}={following}"
            yield from (FLAG, name)
        else:
            yield argument


def translate_flags(arguments: Sequence[str], own: Mapping[str, bool]) -> list[str]:
    """Return the arguments of a command with the names and values of other engines as treadle's.

    ``own`` are the command's flags, and whether each takes a value. Logs and raises as
    ``treadle.option_names.translate`` does.
    """
    return _Translation(arguments, own).run()


class _Translation:
    """One command line. ``rest`` is what is not read yet, the next argument last."""

    def __init__(self, arguments: Sequence[str], own: Mapping[str, bool]) -> None:
        self.own = own
        self.rest = list(reversed(arguments))
        self.result: list[str] = []
        self.has_model = False
        self.tables: dict[str, dict[str, Any]] = {}
        self.short = {s: n for n, row in answers_to().items() for s in row.short if s not in own}

    def run(self) -> list[str]:
        while self.rest:
            argument = self.rest.pop()
            if argument == "--":
                self.rest.append(argument)
                break
            if not argument.startswith("-") or argument == "-" or NUMBER.match(argument):
                self.has_model = True
                self.result.append(argument)
            else:
                self.flag(argument)
        for name, table in self.tables.items():
            self.put(name, msgspec.json.encode(table).decode())
        return self.result + self.rest[::-1]

    def flag(self, argument: str) -> None:
        flag, equals, text = argument.partition("=")
        flag, dot, path = flag.partition(".")
        if flag in self.short:
            name = self.short[flag]
        elif flag.startswith(OPTIMIZATION) and flag[2:].isdigit():  # -O3
            name, equals, text = self.short[OPTIMIZATION], "=", flag[2:]
        elif flag.startswith("--"):
            name = flag[2:].replace("-", "_")
        else:
            name = ""
        row, positive = answers_to().get(name), name.removeprefix(NEGATION)
        is_own = _spelled(name) in self.own or name == "model"
        if dot and (is_own or row is not None):
            self.dotted(name, path, text if equals else self.value(), is_own)
        elif row is not None and (row.refusal or row.excuse):
            if row.switch:
                self.give(name, text.lower() not in ("false", "0") if equals else True)
            else:
                self.give(name, _read(text if equals else self.values(row)))
        elif not is_own and row is None and (row := answers_to().get(positive)) and row.switch:
            self.give(positive, False)
        elif is_own or row is not None:
            self.known(name, row, equals, text)
        else:
            self.result.append(argument)
            if not equals and self.own.get(argument):
                self.result.append(self.value())

    def known(self, name: str, row: OptionName | None, equals: str, text: str) -> None:
        """Take the flag of an option that treadle has."""
        own_flag = _spelled(row.ours if row is not None and row.ours else name)
        if not self.own.get(own_flag, True):  # a switch
            self.result.append(own_flag + equals + text)
        elif row is not None and row.many:
            texts = _items(text) if equals else [i for t in self.many() for i in _items(t)]
            for item in texts:
                self.give(name, item)
        elif equals or self.rest:
            self.give(name, text if equals else self.value())
        else:
            self.result.append(own_flag)  # the parser says that its value is missing

    def dotted(self, name: str, path: str, text: str, is_own: bool) -> None:
        """Take one field of an option that is a table: ``--hf-overrides.rope_theta 1e6``."""
        path = path.replace("-", "_")
        if f"{name}.{path}" in answers_to():
            self.give(f"{name}.{path}", text)
        elif not is_own:
            self.give(name, {path: _read(text)})
        else:
            table = self.tables.setdefault(name, {})
            *outer, last = path.split(".")
            for key in outer:
                table = table.setdefault(key, {})
            table[last] = _read(text)

    def give(self, name: str, value: Any) -> None:
        """Translate an option and append what is left of it."""
        for own_name, canonical_value in translate(name, value, _spelled):
            for item in canonical_value if isinstance(canonical_value, list) else [canonical_value]:
                self.put(own_name, str(item))

    def put(self, name: str, text: str) -> None:
        flag = _spelled(name)
        if name == "model" and flag not in self.own:
            self.has_model = True
            self.result.append(text)
        else:
            self.result += [flag, text]

    def value(self) -> str:
        return self.rest.pop() if self.rest else ""

    def values(self, row: OptionName) -> str:
        """Return the value of a flag without effect, or its values as one text."""
        return " ".join(self.many()) if row.many else self.value()

    def many(self) -> list[str]:
        """Return the values of a flag that may have several. What follows the first may be the
        model, unless that is known already."""
        texts = [self.value()]
        has_model = self.has_model or any(a.partition("=")[0] == "--model" for a in self.rest)
        while has_model and self.rest and not self.rest[-1].startswith("-"):
            texts.append(self.rest.pop())
        return texts


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")


def _items(text: str) -> list[str]:
    """The values in one argument: a JSON list, or the text itself."""
    value = _read(text)
    return [str(item) for item in value] if isinstance(value, list) else [text]


def _read(text: str) -> Any:
    """Return what the text is in JSON, or the text itself."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
