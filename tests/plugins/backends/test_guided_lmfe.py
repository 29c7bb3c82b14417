"""weft-guided-lmfe passes the suite, and refuses what it should."""

from __future__ import annotations

from weft.testing.guided import GuidedSuite
from weft.testing.plugin import PluginSuite


class TestLMFE(PluginSuite, GuidedSuite):
    plugin = "guided:lmfe"
