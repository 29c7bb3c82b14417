"""The conformance suite of extensions: they see an engine begin and end, and change only what they
say.

::

    class TestMine(PluginSuite, ExtensionSuite):
        plugin = "extensions:mine"
"""

from __future__ import annotations

import inspect

from weft.config import EngineConfig, from_options
from weft.testing.plugin import Subject
from weft.testing.policies import Queued

__all__ = ("ExtensionSuite",)


class ExtensionSuite(Subject):
    """Its two hooks are called in pairs, and its wrappers hand on what they were given."""

    def config(self) -> EngineConfig:
        return from_options(model="nowhere")

    def test_an_engine_begins_and_ends_twice(self) -> None:
        for _ in range(2):
            host = self.host()
            host.configure(self.config())
            host.unconfigure()
            host.unconfigure()

    def test_the_configuration_is_left_as_it_is(self) -> None:
        config = self.config()
        host = self.host()
        host.configure(config)
        host.unconfigure()
        assert config == self.config()

    def test_what_it_reports_is_one_line(self) -> None:
        host = self.host()
        host.configure(self.config())
        try:
            assert all("\n" not in line for line in host.report())
        finally:
            host.unconfigure()

    def test_its_wrappers_give_an_answer(self) -> None:
        """A wrapper that forgets ``return`` turns every plugin into one that answers ``None``."""
        host = self.host()
        plugin = host.load(self.kind, self.key)
        _, wrapped = host.hooks_of(plugin)
        for hook in wrapped:
            source = inspect.getsource(getattr(plugin, hook))
            assert "yield" in source and "return" in source, f"{hook} returns nothing"
        assert host.policy("fcfs").order(Queued("r", 1.0)) == (1.0,)
