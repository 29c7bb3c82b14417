"""Flags that the parser of the command line does not know, rewritten to flags that it knows."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from treadle.config import IGNORED_OPTIONS, OPTION_ALIASES

__all__ = ("FLAG", "rewrite_flags")

log = logging.getLogger(__name__)

PREFIX = "--plugin."
FLAG = "--plugin-option"


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


ALIASES = {_flag(alias): _flag(name) for alias, name in OPTION_ALIASES.items()}
IGNORED = {_flag(name): reason for name, reason in IGNORED_OPTIONS.items()}


def rewrite_flags(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with flags that the parser knows.

    ``--plugin.K.K.o=v`` and ``--plugin.K.K.o v`` become ``--plugin-option K.K.o=v``. Names that
    other engines give to an option become treadle's, with a warning that gives the real name.
    """
    return list(_rewritten(iter(arguments)))


def _rewritten(arguments: Iterator[str]) -> Iterator[str]:
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if argument == "--":
            yield argument
            yield from arguments
        elif argument.startswith(PREFIX):
            name = argument.removeprefix(PREFIX)
            if "=" not in name:
                following = next(arguments, None)
                name = name if following is None else f"{name}={following}"
            yield from (FLAG, name)
        elif flag in ALIASES:
            log.warning("%s is accepted; its name in treadle is %s", flag, ALIASES[flag])
            yield ALIASES[flag] + equals + value
        elif flag in IGNORED:
            log.warning("%s has no effect: %s", flag, IGNORED[flag])
        else:
            yield argument
