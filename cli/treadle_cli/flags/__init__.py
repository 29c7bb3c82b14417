"""Flags made from the Structs that describe the options."""

from treadle_cli.flags.groups import (
    BENCH,
    BENCH_SERVE,
    COMPLETION,
    ENGINE,
    PLUGINS,
    SAMPLING,
    Group,
    server_group,
)
from treadle_cli.flags.options import Options
from treadle_cli.flags.signature import with_flags

__all__ = (
    "BENCH",
    "BENCH_SERVE",
    "COMPLETION",
    "ENGINE",
    "PLUGINS",
    "SAMPLING",
    "Group",
    "Options",
    "server_group",
    "with_flags",
)
