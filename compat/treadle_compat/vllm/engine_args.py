"""``EngineArgs``: the options of an engine as attributes and as flags of a program."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, get_type_hints

import msgspec

from treadle.config import config_sections, from_options
from treadle.option_names import OptionName, answers_to

__all__ = ("AsyncEngineArgs", "EngineArgs", "FlexibleArgumentParser")

SWITCHES = {
    name
    for _, section in config_sections()
    for name, hint in get_type_hints(section).items()
    if hint is bool
}
TEXTS = {
    name
    for _, section in config_sections()
    for name, hint in get_type_hints(section).items()
    if hint in (str, str | None)
}


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser to which ``--max_model_len`` is ``--max-model-len``."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        import sys

        texts: Sequence[str] = sys.argv[1:] if args is None else args
        return super().parse_known_args([_dashed(text) for text in texts], namespace)


class EngineArgs:
    """The options of an engine, under vLLM's names. Raises ``ConfigError`` for a wrong one."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.options = {"model": model, **options}
        from_options({n: v for n, v in self.options.items() if v is not None})

    def __getattr__(self, name: str) -> Any:
        if name != "options" and name in {*self.options, *_names()}:
            return self.options.get(name)
        raise AttributeError(f"EngineArgs has no attribute {name!r}")

    @staticmethod
    def add_cli_args(parser: Any) -> Any:
        """Add a flag for each option, and return the parser. A flag that is not given is ``None``."""
        for name, row in _names().items():
            flags = ["--" + name.replace("_", "-"), *(s for s in row.short if s != "-O")]
            keywords: dict[str, Any] = {"dest": name, "default": None, "help": argparse.SUPPRESS}
            if row.switch or name in SWITCHES:
                keywords["action"] = argparse.BooleanOptionalAction
            else:
                keywords["type"] = str if name in TEXTS else _value
                keywords["nargs"] = "+" if row.many else None
            parser.add_argument(*flags, **keywords)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Return the options of a namespace, without what else the program has put there."""
        return cls(**{n: v for n, v in vars(args).items() if n in _names() and v is not None})


class AsyncEngineArgs(EngineArgs):
    """The options of an engine in its own process."""


def _names() -> dict[str, OptionName]:
    """Every option of treadle's engine and of vLLM's table."""
    own = {
        name: OptionName() for _, section in config_sections() for name in get_type_hints(section)
    }
    own.pop("plugin_options")
    return own | {n: r for n, r in answers_to().items() if n.isidentifier() and n != "config"}


def _value(text: str) -> Any:
    """Return what the text is in JSON, or the text itself."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _dashed(text: str) -> str:
    flag, equals, value = text.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else text
