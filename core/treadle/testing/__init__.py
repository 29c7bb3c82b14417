"""The conformance kit: one suite for each kind of plugin, subclassed by whoever writes a plugin.

::

    from treadle.testing.plugin import PluginSuite
    from treadle.testing.policies import PolicySuite


    class TestShortest(PluginSuite, PolicySuite):
        plugin = "scheduling_policies:shortest"
"""

import sys

SUITES = (
    "architectures",
    "attention",
    "communicators",
    "executors",
    "extensions",
    "grammars",
    "kernels",
    "logits",
    "matching",
    "parsers",
    "plugin",
    "policies",
    "quantization",
    "sources",
    "stats",
    "streams",
    "structured_output",
    "text",
)

# Without this, a check that fails shows no values: pytest rewrites asserts of test files only.
if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite(*(f"treadle.testing.{name}" for name in SUITES))
