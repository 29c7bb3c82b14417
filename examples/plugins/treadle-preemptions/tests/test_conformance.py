from treadle.api.kinds import SCHEDULING_POLICIES
from treadle.testing.extensions import ExtensionSuite
from treadle.testing.introspection import report
from treadle.testing.plugin import PluginSuite
from treadle.testing.policies import FakeQueuedRequest, PolicySuite


class TestPreemptions(PluginSuite, ExtensionSuite):
    plugin = "extensions:preemptions"

    def test_victims_are_counted_whatever_the_policy(self):
        plugins = self.plugin_manager()
        policy = plugins.create(SCHEDULING_POLICIES, "priority")
        policy.select_victim([FakeQueuedRequest("a", 1.0, 3), FakeQueuedRequest("b", 2.0, 5)])
        assert report(plugins) == ["treadle-preemptions 0.1.0: preempted priority 5: 1"]


class TestWrapped(PolicySuite):
    """The policy of another plugin is still a policy."""

    plugin = "scheduling_policies:priority"
