"""The plugin host: finds plugins without importing them, imports the ones that are asked for."""

from treadle.plugins.entries import Entry
from treadle.plugins.host import Host
from treadle.plugins.kinds import KINDS, Kind
from treadle.plugins.selection import Choice, Plan

__all__ = ("KINDS", "Choice", "Entry", "Host", "Kind", "Plan")
