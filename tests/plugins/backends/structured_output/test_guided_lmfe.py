"""treadle-guided-lmfe passes the suite, and refuses what it should."""

from __future__ import annotations

from treadle.testing.guided import GuidedSuite
from treadle.testing.plugin import PluginSuite


class TestLMFE(PluginSuite, GuidedSuite):
    plugin = "guided:lmfe"
