"""treadle-llguidance passes the suite, and refuses what it should."""

from __future__ import annotations

from treadle.testing.plugin import PluginSuite
from treadle.testing.structured_output import StructuredOutputSuite


class TestLLGuidance(PluginSuite, StructuredOutputSuite):
    plugin = "structured_output:llguidance"
