"""The ``weft`` command. Each subcommand is a plugin of the group ``weft.commands``."""

from weft_cli.hookspecs import CommandHooks

__all__ = ("CommandHooks",)
