"""The ``treadle`` command. Each subcommand is a plugin of the group ``treadle.commands``."""

from treadle_cli.hookspecs import CommandHooks

__all__ = ("CommandHooks",)
