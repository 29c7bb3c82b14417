"""Importing, registering as a whole or not at all, and calling."""

from __future__ import annotations

import threading

import pytest

from treadle.api.kinds import QUANTIZATION, SCHEDULING_POLICIES
from treadle.errors import CheckpointError, PluginLoadError
from treadle.plugins.entries import Entry
from treadle.testing.introspection import hook_calls

OK = "ok-quant"


@pytest.fixture
def good(site):
    site.scheme(OK, "ok")
    return site


def failure(plugins, method):
    with pytest.raises(PluginLoadError) as error:
        plugins.create(QUANTIZATION, method, checkpoint={}, device=None)
    return error.value


def test_a_broken_import_is_a_state_with_a_reason(good):
    good.scheme("bad", "bad", code="import missing_kernel")
    plugins = good.plugin_manager()
    error = failure(plugins, "bad")
    assert str(error) == (
        "quantization:bad from bad 1.0 failed to load: ModuleNotFoundError: "
        "No module named 'missing_kernel' (bad.py, line 1)"
    )
    assert isinstance(error.__cause__, ModuleNotFoundError)
    [entry] = [e for e in plugins.entries if e.key == "bad"]
    assert (entry.state, entry.reason) == (
        "broken",
        "ModuleNotFoundError: No module named 'missing_kernel' (bad.py, line 1)",
    )
    assert plugins.create(QUANTIZATION, "ok", checkpoint={}, device=None).name == OK


def test_a_plugin_that_exits_while_it_is_imported(good):
    good.scheme("bad", "bad", code="raise SystemExit(3)")
    assert "SystemExit: 3" in str(failure(good.plugin_manager(), "bad"))


UNKNOWN_HOOK = """
    from treadle.api import impl

    @impl
    def treadle_quantization(method):
        return object()

    @impl
    def treadle_quantisation(method):
        return None
"""
UNKNOWN_ARGUMENT = """
    from treadle.api import impl

    @impl
    def treadle_quantization(methd):
        return object()
"""
RENAMED = """
    from treadle.api import impl

    @impl(specname="treadle_quantization")
    def mine(method):
        return object()
"""

OLD_WRAPPER = """
    from treadle.api import impl

    @impl(hookwrapper=True)
    def treadle_quantization(method):
        yield
"""


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (UNKNOWN_HOOK, "unknown hook 'treadle_quantisation'"),
        (
            UNKNOWN_ARGUMENT,
            "Argument(s) {'methd'} are declared in the hookimpl but can not be found",
        ),
        (RENAMED, "under another name"),
        (OLD_WRAPPER, "with hookwrapper=True; write wrapper=True"),
        ("VALUE = 1", "implements no hook"),
    ],
)
def test_registration_is_atomic(good, code, reason):
    """A half-registered plugin would be blamed on the next one, or answer for it."""
    good.scheme("bad", "bad", code=code)
    plugins = good.plugin_manager()
    assert reason in str(failure(plugins, "bad"))
    assert plugins.create(QUANTIZATION, "ok", checkpoint={}, device=None).name == OK
    assert reason in str(failure(plugins, "bad")), "the second attempt must tell the same"
    with hook_calls(plugins) as fired:
        plugins.create(QUANTIZATION, "ok", checkpoint={}, device=None)
    assert fired == ["treadle_quantization"]


def test_what_a_plugin_raises_is_wrapped_and_chained(good):
    good.scheme(
        "bad",
        "bad",
        code="""
            from treadle.api import impl

            @impl
            def treadle_quantization(method, checkpoint):
                return checkpoint["bits"]
        """,
    )
    error = failure(good.plugin_manager(), "bad")
    assert str(error) == (
        "quantization:bad from bad 1.0 failed in treadle_quantization: KeyError: 'bits' (bad.py, line 6)"
    )
    assert isinstance(error.__cause__, KeyError)


def test_what_a_plugin_says_on_purpose_passes(good):
    good.scheme(
        "picky",
        "picky",
        code="""
            from treadle.api import impl
            from treadle.errors import CheckpointError

            @impl
            def treadle_quantization(method):
                raise CheckpointError("3 bits are not supported (allowed: 4)")
        """,
    )
    with pytest.raises(CheckpointError, match="3 bits"):
        good.plugin_manager().create(QUANTIZATION, "picky", checkpoint={}, device=None)


def test_only_the_owner_is_imported(good):
    import sys

    good.scheme("other", "other")
    good.plugin_manager().create(QUANTIZATION, "ok", checkpoint={}, device=None)
    assert "ok_quant" in sys.modules and "other" not in sys.modules


def test_a_class_is_instantiated(site):
    site.install(
        "classy",
        {"treadle.scheduling_policies": {"lifo": "classy:Lifo"}},
        """
        from treadle.api import Plugin, impl

        class Lifo(Plugin):
            @impl
            def treadle_scheduling_policy(self, name, options):
                return self
        """,
    )
    assert type(site.plugin_manager().create(SCHEDULING_POLICIES, "lifo")).__name__ == "Lifo"


def test_a_target_that_is_missing_from_its_module(site):
    site.install("classy", {"treadle.scheduling_policies": {"lifo": "classy:Nobody"}}, "VALUE = 1")
    with pytest.raises(PluginLoadError, match="Nobody"):
        site.plugin_manager().create(SCHEDULING_POLICIES, "lifo")


def test_loading_from_many_threads_registers_once(site):
    site.scheme("slow", "a", "b", extra="import time; time.sleep(0.05)")
    plugins = site.plugin_manager()
    names, errors = [], []

    def ask(key):
        try:
            names.append(plugins.create(QUANTIZATION, key, checkpoint={}, device=None).name)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(key,)) for key in "abab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (names, errors) == (["slow"] * 4, [])


def test_an_error_says_where_in_the_package_it_comes_from():
    code = compile("\n1 / 0", "/site/mine/parts/__init__.py", "exec")
    entry = Entry("scheduling_policies", "mine", "mine.parts:Policy", "mine", "1.0")
    with pytest.raises(ZeroDivisionError) as raised:
        exec(code, {"__name__": "mine.parts"})  # noqa: S102
    message = "ZeroDivisionError: division by zero"
    assert entry.error_text(raised.value) == f"{message} (mine/parts/__init__.py, line 2)"
    assert entry.error_text(ZeroDivisionError("division by zero")) == message
