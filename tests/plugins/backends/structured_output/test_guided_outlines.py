"""treadle-guided-outlines passes the suite, and refuses what it should."""

from __future__ import annotations

from treadle.testing.guided import GuidedSuite
from treadle.testing.plugin import PluginSuite


class TestOutlines(PluginSuite, GuidedSuite):
    plugin = "guided:outlines"
