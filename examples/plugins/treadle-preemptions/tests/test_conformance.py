from treadle.api.kinds import POLICIES
from treadle.testing.extensions import ExtensionSuite
from treadle.testing.plugin import PluginSuite
from treadle.testing.policies import PolicySuite, Queued


class TestPreemptions(PluginSuite, ExtensionSuite):
    plugin = "extensions:preemptions"

    def test_victims_are_counted_whatever_the_policy(self):
        host = self.host()
        policy = host.create(POLICIES, "priority")
        policy.victim([Queued("a", 1.0, 3), Queued("b", 2.0, 5)])
        assert host.report() == ["treadle-preemptions 0.1.0: preempted priority 5: 1"]


class TestWrapped(PolicySuite):
    """The policy of another plugin is still a policy."""

    plugin = "policies:priority"
