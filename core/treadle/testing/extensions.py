"""The conformance suite of extensions: they see an engine begin and end, and change only what they
say.

::

    class TestMine(PluginSuite, ExtensionSuite):
        plugin = "extensions:mine"
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator
from typing import Any

from treadle.api import hookspecs
from treadle.api.kinds import SCHEDULING_POLICIES
from treadle.config import EngineConfig, from_options
from treadle.engine.extensions import ConfiguredExtensions
from treadle.plugins import PluginManager
from treadle.testing.introspection import hooks_of, report
from treadle.testing.plugin import PluginTest, hook_arguments
from treadle.testing.policies import FakeQueuedRequest

__all__ = ("ExtensionSuite",)


class ExtensionSuite(PluginTest):
    """Checks that its hooks are called in pairs and that its wrappers return results."""

    def config(self) -> EngineConfig:
        return from_options(model="nowhere")

    def quiet(self, plugins: PluginManager) -> None:
        """Fail if a hook raises: a plugin manager would log the error and continue."""
        failed = [
            hook
            for plugin, hook, outcome, _ in plugins.call_stats.rows()
            if plugin == self.plugin and outcome == "error"
        ]
        assert failed == [], f"{failed} raised; see the log"

    def test_engines_begin_and_end(self) -> None:
        """Engines run one after the other and at the same time, each with its own plugin manager."""
        for count in (1, 1, 2):
            hosts = [self.plugin_manager() for _ in range(count)]
            engines: list[ConfiguredExtensions] = []
            try:
                engines += [ConfiguredExtensions(plugins, self.config()) for plugins in hosts]
            finally:
                for extensions in engines:
                    extensions.unconfigure()
                for plugins in hosts:
                    self.quiet(plugins)

    def test_the_configuration_is_left_as_it_is(self) -> None:
        config = self.config()
        plugins = self.plugin_manager()
        ConfiguredExtensions(plugins, config).unconfigure()
        assert config == self.config()

    def test_what_it_reports_is_one_line(self) -> None:
        """A report is requested with a running engine and without: ``treadle doctor`` starts none."""
        plugins = self.plugin_manager()
        lines = report(plugins)
        extensions = ConfiguredExtensions(plugins, self.config())
        try:
            lines += report(plugins)
            self.quiet(plugins)
            assert all("\n" not in line for line in lines)
        finally:
            extensions.unconfigure()

    def test_its_wrappers_give_an_answer(self) -> None:
        """A wrapper without ``return`` would replace every plugin's result by ``None``."""
        plugins = self.plugin_manager()
        for hook, wrapper in self.wrappers(plugins):
            source = inspect.getsource(wrapper)
            assert "yield" in source and "return" in source, f"{hook} returns nothing"
        assert plugins.create(SCHEDULING_POLICIES, "fcfs").sort_key(
            FakeQueuedRequest("r", 1.0)
        ) == (1.0,)

    def test_its_wrappers_keep_what_nobody_provides(self) -> None:
        """Otherwise the error could not name the missing plugin."""
        for hook, wrapper in self.wrappers(self.plugin_manager()):
            empty: list[Any] | None = [] if hasattr(hookspecs.AllResultsHooks, hook) else None
            wrapping = self.wrapping(hook, wrapper)
            try:
                wrapping.send(empty)
            except StopIteration as end:
                assert end.value == empty, f"{hook} made {end.value!r} of {empty!r}"

    def test_its_wrappers_hand_on_errors(self) -> None:
        for hook, wrapper in self.wrappers(self.plugin_manager()):
            raised = False
            try:
                self.wrapping(hook, wrapper).throw(LookupError("of the plugin that is wrapped"))
            except StopIteration:
                pass
            except Exception:
                raised = True
            assert raised, f"{hook} swallows what another plugin raises"

    def wrappers(self, plugins: PluginManager) -> Iterator[tuple[str, Any]]:
        plugin = plugins.load(self.kind, self.key)
        for hook in hooks_of(plugins, plugin)[1]:
            yield hook, getattr(plugin, hook)

    def wrapping(self, hook: str, wrapper: Any) -> Generator[None, Any, Any]:
        """A call of a hook wrapper that has reached its ``yield``."""
        values = hook_arguments(hook, self.plugin_manager())
        parameters = inspect.signature(wrapper).parameters
        call: Generator[None, Any, Any] = wrapper(**{name: values[name] for name in parameters})
        next(call)
        return call
