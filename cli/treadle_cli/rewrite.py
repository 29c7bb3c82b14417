"""``--plugin.KIND.KEY.option=value`` for a parser that knows only flags declared in advance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ("FLAG", "plugin_flags")

PREFIX = "--plugin."
FLAG = "--plugin-option"


def plugin_flags(arguments: Sequence[str]) -> list[str]:
    """Rewrite ``--plugin.K.K.o=v`` and ``--plugin.K.K.o v`` to ``--plugin-option K.K.o=v``."""
    return list(_rewritten(iter(arguments)))


def _rewritten(arguments: Iterator[str]) -> Iterator[str]:
    for argument in arguments:
        if argument == "--":
            yield argument
            yield from arguments
        elif argument.startswith(PREFIX):
            name = argument.removeprefix(PREFIX)
            if "=" not in name:
                value = next(arguments, None)
                name = name if value is None else f"{name}={value}"
            yield from (FLAG, name)
        else:
            yield argument
