"""Flags made from the Structs that describe the options."""

from weft_cli.flags.groups import BENCH, ENGINE, PLUGINS, SAMPLING, Group, server_group
from weft_cli.flags.options import Options
from weft_cli.flags.signature import with_flags

__all__ = (
    "BENCH",
    "ENGINE",
    "PLUGINS",
    "SAMPLING",
    "Group",
    "Options",
    "server_group",
    "with_flags",
)
