"""The plugin host: finds plugins without importing them, imports the ones that are asked for."""

from weft.plugins.entries import Entry
from weft.plugins.host import Host
from weft.plugins.kinds import KINDS, Kind
from weft.plugins.plan import Choice, Plan

__all__ = ("KINDS", "Choice", "Entry", "Host", "Kind", "Plan")
