"""weft-guided-llguidance passes the suite, and refuses what it should."""

from __future__ import annotations

from weft.testing.guided import GuidedSuite
from weft.testing.plugin import PluginSuite


class TestLLGuidance(PluginSuite, GuidedSuite):
    plugin = "guided:llguidance"
