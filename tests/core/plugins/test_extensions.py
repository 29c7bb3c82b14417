"""Extensions wrap hooks and see the life of an engine; other distributions add their own hooks."""

from __future__ import annotations

import sys

import pluggy
import pytest

from treadle.api.kinds import QUANTIZATION, SCHEDULING_POLICIES
from treadle.api.plugin_kind import PluginKind
from treadle.config import PluginConfig
from treadle.engine.extensions import ConfiguredExtensions
from treadle.errors import PluginLoadError
from treadle.plugins import Entry, PluginManager, installed_kinds
from treadle.testing.introspection import hook_calls, report

WRAPPER = """
    from treadle.api import impl

    calls = []

    @impl(wrapper=True)
    def treadle_quantization(method):
        found = yield
        calls.append((method, found.name))
        return found
"""
LIFE = """
    from treadle.api import impl
    import life

    @impl
    def treadle_configure(config):
        life.log.append(("configure", __name__, config))

    @impl
    def treadle_unconfigure():
        life.log.append(("unconfigure", __name__))

    @impl
    def treadle_report():
        return "hello from " + __name__
"""


@pytest.fixture
def life(site):
    (site.folder / "life.py").write_text("log = []")
    site.modules.add("life")
    for name in ("b-ext", "a-ext"):
        site.install(name, {"treadle.extensions": {name[0]: name.replace("-", "_")}}, LIFE)
    return site


def life_log():
    return sys.modules["life"].log


def test_a_wrapper_sees_every_plugin_built(site):
    site.scheme("acme-awq", "awq", "gptq")
    site.install("wrap", {"treadle.extensions": {"wrap": "wrap"}}, WRAPPER)
    plugins = site.plugin_manager()
    assert "wrap" not in sys.modules, "extensions are imported by the first call"
    plugins.create(QUANTIZATION, "awq", checkpoint={}, device=None)
    plugins.create(QUANTIZATION, "gptq", checkpoint={}, device=None)
    assert sys.modules["wrap"].calls == [("awq", "acme-awq"), ("gptq", "acme-awq")]


COUNTING = """
    from treadle.api import impl

    calls = []

    @impl
    def treadle_scheduling_policy(name, options):
        calls.append(name)
        if options:
            raise StopIteration("of the plugin")
        return name
"""
FAILING = """
    from treadle.api import impl

    @impl(wrapper=True)
    def treadle_scheduling_policy(name):
        found = yield
        raise KeyError("of the wrapper")
"""


def test_a_plugin_is_called_once_though_its_wrapper_fails(site):
    site.install("acme", {"treadle.scheduling_policies": {"mine": "acme"}}, COUNTING)
    site.install("wrap", {"treadle.extensions": {"wrap": "wrap"}}, FAILING)
    plugins = site.plugin_manager()
    assert plugins.create(SCHEDULING_POLICIES, "mine") == "mine"
    assert sys.modules["acme"].calls == ["mine"]
    assert ("extensions:wrap", "treadle_scheduling_policy", "error", 1) in plugins.call_stats.rows()


def test_what_the_plugin_raises_is_not_its_wrappers_failure(site):
    site.install("acme", {"treadle.scheduling_policies": {"mine": "acme"}}, COUNTING)
    site.install("wrap", {"treadle.extensions": {"wrap": "wrap"}}, FAILING)
    plugins = site.plugin_manager(plugin_options={"scheduling_policies:mine": {"fail": True}})
    with pytest.raises(
        PluginLoadError, match=r"scheduling_policies:mine from acme .*of the plugin"
    ):
        plugins.create(SCHEDULING_POLICIES, "mine")
    assert not [row for row in plugins.call_stats.rows() if row[0] == "extensions:wrap"]


def test_a_disabled_wrapper_sees_nothing(site):
    site.scheme("acme-awq", "awq")
    site.install("wrap", {"treadle.extensions": {"wrap": "wrap"}}, WRAPPER)
    site.plugin_manager(disable_plugin=["wrap"]).create(
        QUANTIZATION, "awq", checkpoint={}, device=None
    )
    assert "wrap" not in sys.modules


def test_a_broken_extension_is_left_out_with_a_warning(site, caplog):
    site.scheme("acme-awq", "awq")
    site.install("bad", {"treadle.extensions": {"bad": "bad"}}, "import missing_kernel")
    assert (
        site.plugin_manager().create(QUANTIZATION, "awq", checkpoint={}, device=None).name
        == "acme-awq"
    )
    assert "missing_kernel" in caplog.text and "goes on without it" in caplog.text


def test_configure_unconfigure_and_report(life):
    plugins = life.plugin_manager()
    extensions = ConfiguredExtensions(plugins, "config")
    extensions.unconfigure()
    extensions.unconfigure()
    assert life_log() == [
        ("configure", "a_ext", "config"),
        ("configure", "b_ext", "config"),
        ("unconfigure", "b_ext"),
        ("unconfigure", "a_ext"),
    ]
    assert report(plugins) == ["a-ext 1.0: hello from a_ext", "b-ext 1.0: hello from b_ext"]


def test_a_failing_configure_releases_those_before_it(life):
    life.install(
        "c-ext",
        {"treadle.extensions": {"c": "c_ext"}},
        """
        from treadle.api import impl

        @impl
        def treadle_configure(config):
            raise OSError("no socket")
        """,
    )
    with pytest.raises(PluginLoadError, match=r"extensions:c from c-ext 1\.0 failed.*no socket"):
        ConfiguredExtensions(life.plugin_manager(), "config")
    assert [entry[:2] for entry in life_log()[-2:]] == [
        ("unconfigure", "b_ext"),
        ("unconfigure", "a_ext"),
    ]


class Specs:
    """The hooks of a distribution that declares a kind of its own."""

    @pluggy.HookspecMarker("treadle")
    def treadle_dashboard(self, app, engine, options):
        """Edit the application."""


DASHBOARDS = PluginKind(
    name="dashboards",
    key="name",
    hook="treadle_dashboard",
    builds=None,
    specs=Specs,
    mode="always",
    owner="acme",
)
KINDS = {**installed_kinds(), "dashboards": DASHBOARDS}


def call_dashboards(plugins, app, engine):
    """As the distribution that declares the kind does."""
    for entry in plugins.loaded(DASHBOARDS):
        options = plugins.options_of(entry, entry.key)
        plugins.hooks(entry).treadle_dashboard(app=app, engine=engine, options=options)


DASHBOARD = """
    from treadle.api import impl

    @impl
    def treadle_dashboard(app, engine, options):
        app.append((__name__, engine, dict(options)))
"""


def test_hooks_of_another_distribution_are_called_in_name_order(site):
    for name in ("b-srv", "a-srv"):
        site.install(name, {"treadle.dashboards": {name[0]: name.replace("-", "_")}}, DASHBOARD)
    config = PluginConfig(plugin_options={"dashboards:a": {"x": 1}})
    plugins = PluginManager(config, source=site.scan, kinds=KINDS)
    app: list[object] = []
    call_dashboards(plugins, app, "E")
    assert app == [("a_srv", "E", {"x": 1}), ("b_srv", "E", {})]


def test_a_plugin_may_implement_hooks_of_an_absent_distribution(site):
    """A package with a policy and a server hook must work where no server is installed."""
    code = (
        DASHBOARD.replace(", options", "").replace(", dict(options)", "")
        + """
    @impl
    def treadle_scheduling_policy(name):
        return name
    """
    )
    site.install(
        "both",
        {"treadle.scheduling_policies": {"p": "both"}, "treadle.dashboards": {"s": "both"}},
        code,
    )
    plugins = site.plugin_manager()
    assert plugins.create(SCHEDULING_POLICIES, "p") == "p"
    plugins = PluginManager(source=site.scan, kinds=KINDS)
    app: list[object] = []
    call_dashboards(plugins, app, None)
    assert len(app) == 1


def test_calls_records_hooks_only_inside_the_block(site):
    site.scheme("acme-awq", "awq")
    plugins = site.plugin_manager()
    plugins.create(QUANTIZATION, "awq", checkpoint={}, device=None)
    with hook_calls(plugins) as fired:
        assert fired == []
        plugins.create(QUANTIZATION, "awq", checkpoint={}, device=None)
        assert fired == ["treadle_quantization"]
    plugins.create(QUANTIZATION, "awq", checkpoint={}, device=None)
    assert fired == ["treadle_quantization"]


def test_a_host_made_from_a_list_needs_no_packaging(site):
    (site.folder / "plain.py").write_text(
        "from treadle.api import impl\n@impl\ndef treadle_scheduling_policy(name):\n    return name.upper()\n"
    )
    site.modules.add("plain")
    plugins = PluginManager(
        source=lambda: [Entry("scheduling_policies", "x", "plain", "nowhere", "0")]
    )
    assert plugins.create(SCHEDULING_POLICIES, "x") == "X"
