"""treadle-lm-format-enforcer passes the suite, and refuses what it should."""

from __future__ import annotations

from treadle.testing.plugin import PluginSuite
from treadle.testing.structured_output import StructuredOutputSuite


class TestLMFormatEnforcer(PluginSuite, StructuredOutputSuite):
    plugin = "structured_output:lm-format-enforcer"
