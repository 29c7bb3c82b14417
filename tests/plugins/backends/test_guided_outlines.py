"""weft-guided-outlines passes the suite, and refuses what it should."""

from __future__ import annotations

from weft.testing.guided import GuidedSuite
from weft.testing.plugin import PluginSuite


class TestOutlines(PluginSuite, GuidedSuite):
    plugin = "guided:outlines"
