"""The conformance suite of scheduling policies.

::

    class TestMine(PluginSuite, PolicySuite):
        plugin = "scheduling_policies:mine"
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from treadle.api.engine import SchedulingPolicy
from treadle.api.kinds import SCHEDULING_POLICIES
from treadle.testing.plugin import PluginTest

__all__ = ("FakeQueuedRequest", "PolicySuite")


@dataclass(frozen=True)
class FakeQueuedRequest:
    """A request as a policy sees it; writing to it raises."""

    id: str
    arrival_time: float = 0.0
    priority: int = 0
    num_prompt_tokens: int = 10
    num_output_tokens: int = 0
    client: str = ""
    extra_args: Mapping[str, Any] = field(default_factory=dict)


class PolicySuite(PluginTest):
    """Checks that order and preemption are total, constant, and starve no request."""

    def build(self) -> SchedulingPolicy:
        return self.plugin_manager().create(SCHEDULING_POLICIES, self.key)

    def requests(self, count: int = 40) -> list[FakeQueuedRequest]:
        draw = random.Random(0)
        return [
            FakeQueuedRequest(
                f"r{i}", draw.uniform(0, 1e6), draw.randrange(-3, 4), draw.randrange(1, 9000)
            )
            for i in range(count)
        ]

    def test_two_builds_are_two_objects(self) -> None:
        assert self.build() is not self.build()

    def test_orders_are_numbers_that_compare(self) -> None:
        policy = self.build()
        orders: list[Any] = [policy.sort_key(request) for request in self.requests()]
        assert all(isinstance(order, tuple) and order for order in orders)
        assert all(math.isfinite(value) for order in orders for value in order)
        assert len({len(order) for order in orders}) == 1, "they differ in length"

    def test_the_order_of_a_waiting_request_is_constant(self) -> None:
        policy = self.build()
        requests = self.requests()
        before = [policy.sort_key(request) for request in requests]
        policy.select_victim(requests[:5])
        assert [policy.sort_key(request) for request in requests] == before

    def test_of_two_alike_the_earlier_goes_first(self) -> None:
        policy = self.build()
        for request in self.requests():
            later = replace(request, arrival_time=request.arrival_time + 1.0)
            assert policy.sort_key(request) < policy.sort_key(later), "a later arrival overtakes"

    def test_nobody_waits_for_ever(self) -> None:
        """A request is admitted eventually, whatever requests arrive after it."""
        policy = self.build()
        for request in self.requests():
            for rival in self.requests(8):
                rival = replace(
                    rival, arrival_time=request.arrival_time + 1e9, priority=request.priority
                )
                assert policy.sort_key(request) < policy.sort_key(rival), (
                    f"{rival} always overtakes"
                )

    def test_a_victim_is_one_of_those_that_run(self) -> None:
        policy = self.build()
        requests = self.requests()
        for count in range(1, 9):
            for start in range(len(requests) - count):
                victim: Any = policy.select_victim(requests[start : start + count])
                assert isinstance(victim, int) and 0 <= victim < count

    def test_the_running_are_left_as_they_are(self) -> None:
        """The list belongs to the scheduler, so a policy must not change it."""
        running = self.requests(8)
        before = list(running)
        self.build().select_victim(running)
        assert running == before

    def test_all_requests_end_when_pages_run_out(self) -> None:
        """Run twelve growing sequences with a cache for two."""
        finish_reasons = self.serve(12)
        assert len(finish_reasons) == 12 and set(finish_reasons.values()) == {"length"}, (
            finish_reasons
        )

    def serve(self, count: int) -> dict[str, Any]:
        from treadle.api.requests import EngineRequest
        from treadle.api.sampling_params import SamplingParams
        from treadle.api.step_types import EngineInfo, KVCacheGroup, ModelRunnerOutput
        from treadle.cache import KVCacheManager
        from treadle.config import SchedulerConfig
        from treadle.scheduler.scheduler import Scheduler
        from treadle.scheduler.sequence import SequenceState

        groups = [KVCacheGroup("full", None, 14, 1, 1)]
        cache = KVCacheManager(groups, 4, prefix_caching=False)
        info = EngineInfo(
            model="", architecture="", dtype="float32", device="cpu", vocab_size=99,
            max_model_len=40, page_size=4, kv_cache_groups=groups, num_async_steps=0, eos_token_ids=[],
        )  # fmt: skip
        scheduler = Scheduler(SchedulerConfig(max_num_seqs=6), cache, self.build(), [])
        for index in range(count):
            params = SamplingParams(max_tokens=20 + index, ignore_eos=True)
            prompt = [index + 1] * (4 + index)
            request = EngineRequest(f"r{index}", prompt, params, float(index))
            root = cache.page_hasher.root_hash(None)
            scheduler.add(SequenceState(request, info, root, 0))
        finish_reasons: dict[str, Any] = {}
        for _ in range(5000):
            scheduler_output = scheduler.schedule()
            if scheduler_output is None:
                break
            outputs = scheduler.update_from_output(
                ModelRunnerOutput(scheduler_output.id, [7] * sum(scheduler_output.needs_sampling))
            )
            finish_reasons |= {
                o.id: o.finish_reason for o in outputs if o.finish_reason is not None
            }
        return finish_reasons
