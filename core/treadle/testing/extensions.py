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
from treadle.plugins import PluginManager
from treadle.testing.introspection import hooks_of, report
from treadle.testing.plugin import PluginTest, hook_arguments
from treadle.testing.policies import FakeQueuedRequest

__all__ = ("ExtensionSuite",)


class ExtensionSuite(PluginTest):
    """Its two hooks are called in pairs, and its wrappers hand on what they were given."""

    def config(self) -> EngineConfig:
        return from_options(model="nowhere")

    def quiet(self, plugins: PluginManager) -> None:
        """A host goes on without a hook that fails; here it must not."""
        failed = [
            hook
            for plugin, hook, outcome, _ in plugins.call_stats.rows()
            if plugin == self.plugin and outcome == "error"
        ]
        assert failed == [], f"{failed} raised; see the log"

    def test_engines_begin_and_end(self) -> None:
        """One after the other, and two at once: each has a host of its own."""
        for count in (1, 1, 2):
            hosts = [self.host() for _ in range(count)]
            try:
                for plugins in hosts:
                    plugins.configure(self.config())
            finally:
                for plugins in hosts:
                    plugins.unconfigure()
                    self.quiet(plugins)

    def test_the_configuration_is_left_as_it_is(self) -> None:
        config = self.config()
        plugins = self.host()
        plugins.configure(config)
        plugins.unconfigure()
        assert config == self.config()

    def test_what_it_reports_is_one_line(self) -> None:
        """While an engine runs, and where none does: ``treadle doctor`` starts none."""
        plugins = self.host()
        lines = report(plugins)
        plugins.configure(self.config())
        try:
            lines += report(plugins)
            self.quiet(plugins)
            assert all("\n" not in line for line in lines)
        finally:
            plugins.unconfigure()

    def test_its_wrappers_give_an_answer(self) -> None:
        """A wrapper that forgets ``return`` turns every plugin into one that answers ``None``."""
        plugins = self.host()
        for hook, wrapper in self.wrappers(plugins):
            source = inspect.getsource(wrapper)
            assert "yield" in source and "return" in source, f"{hook} returns nothing"
        assert plugins.create(SCHEDULING_POLICIES, "fcfs").sort_key(
            FakeQueuedRequest("r", 1.0)
        ) == (1.0,)

    def test_its_wrappers_keep_what_nobody_provides(self) -> None:
        """Else it cannot be said which plugin is missing."""
        for hook, wrapper in self.wrappers(self.host()):
            nothing: list[Any] | None = [] if hasattr(hookspecs.AllResultsHooks, hook) else None
            wrapping = self.wrapping(hook, wrapper)
            try:
                wrapping.send(nothing)
            except StopIteration as end:
                assert end.value == nothing, f"{hook} made {end.value!r} of {nothing!r}"

    def test_its_wrappers_hand_on_errors(self) -> None:
        for hook, wrapper in self.wrappers(self.host()):
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
        """A call that has come to its ``yield``."""
        values = hook_arguments(hook, self.host())
        wanted = inspect.signature(wrapper).parameters
        call: Generator[None, Any, Any] = wrapper(**{name: values[name] for name in wanted})
        next(call)
        return call
