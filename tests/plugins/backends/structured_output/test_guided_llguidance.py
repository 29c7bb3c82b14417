"""treadle-guided-llguidance passes the suite, and refuses what it should."""

from __future__ import annotations

from treadle.testing.guided import GuidedSuite
from treadle.testing.plugin import PluginSuite


class TestLLGuidance(PluginSuite, GuidedSuite):
    plugin = "guided:llguidance"
