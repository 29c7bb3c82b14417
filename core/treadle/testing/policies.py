"""The conformance suite of scheduling policies.

::

    class TestMine(PluginSuite, PolicySuite):
        plugin = "policies:mine"
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

from treadle.api.engine import SchedulingPolicy
from treadle.api.kinds import POLICIES
from treadle.testing.plugin import Subject

__all__ = ("PolicySuite", "Queued")


@dataclass(frozen=True)
class Queued:
    """A request as a policy sees it; writing to it raises."""

    id: str
    arrival: float = 0.0
    priority: int = 0
    prompt_len: int = 10
    output_len: int = 0


class PolicySuite(Subject):
    """Order and choice of victim: total, constant, and such that everybody is served."""

    def build(self) -> SchedulingPolicy:
        return self.host().create(POLICIES, self.key)

    def requests(self, count: int = 40) -> list[Queued]:
        draw = random.Random(0)
        return [
            Queued(f"r{i}", draw.uniform(0, 1e6), draw.randrange(-3, 4), draw.randrange(1, 9000))
            for i in range(count)
        ]

    def test_two_builds_are_two_objects(self) -> None:
        assert self.build() is not self.build()

    def test_orders_are_numbers_that_compare(self) -> None:
        policy = self.build()
        orders: list[Any] = [policy.order(request) for request in self.requests()]
        assert all(isinstance(order, tuple) and order for order in orders)
        assert all(math.isfinite(value) for order in orders for value in order)
        assert len({len(order) for order in orders}) == 1, "they differ in length"

    def test_the_order_of_a_waiting_request_is_constant(self) -> None:
        policy = self.build()
        requests = self.requests()
        before = [policy.order(request) for request in requests]
        policy.victim(requests[:5])
        assert [policy.order(request) for request in requests] == before

    def test_of_two_alike_the_earlier_goes_first(self) -> None:
        policy = self.build()
        for request in self.requests():
            later = replace(request, arrival=request.arrival + 1.0)
            assert policy.order(request) < policy.order(later), "a later arrival overtakes"

    def test_nobody_waits_for_ever(self) -> None:
        """Whatever keeps arriving, a request is admitted once others came late enough."""
        policy = self.build()
        for request in self.requests():
            for rival in self.requests(8):
                rival = replace(rival, arrival=request.arrival + 1e9, priority=request.priority)
                assert policy.order(request) < policy.order(rival), f"{rival} always overtakes"

    def test_a_victim_is_one_of_those_that_run(self) -> None:
        policy = self.build()
        requests = self.requests()
        for count in range(1, 9):
            for start in range(len(requests) - count):
                victim: Any = policy.victim(requests[start : start + count])
                assert isinstance(victim, int) and 0 <= victim < count

    def test_the_running_are_left_as_they_are(self) -> None:
        """The list is the scheduler's own."""
        running = self.requests(8)
        before = list(running)
        self.build().victim(running)
        assert running == before

    def test_all_requests_end_when_pages_run_out(self) -> None:
        """The scheduler with a cache for two sequences, and twelve that want to grow."""
        ended = self.serve(12)
        assert len(ended) == 12 and set(ended.values()) == {"length"}, ended

    def serve(self, count: int) -> dict[str, Any]:
        from treadle.api.requests import EngineRequest
        from treadle.api.sampling_params import SamplingParams
        from treadle.api.step_types import CacheGroup, EngineFacts, StepResult
        from treadle.cache import KVCache
        from treadle.config import SchedulerConfig
        from treadle.scheduler.scheduler import Scheduler
        from treadle.scheduler.sequence import Sequence

        groups = [CacheGroup("full", None, 14, 1, 1)]
        cache = KVCache(groups, 4, prefix_caching=False)
        facts = EngineFacts(
            model="", architecture="", dtype="float32", device="cpu", vocab_size=99,
            max_model_len=40, page_size=4, groups=groups, depth=0, eos_ids=[],
        )  # fmt: skip
        scheduler = Scheduler(SchedulerConfig(max_num_seqs=6), cache, self.build(), [])
        for index in range(count):
            params = SamplingParams(max_tokens=20 + index, ignore_eos=True)
            prompt = [index + 1] * (4 + index)
            request = EngineRequest(f"r{index}", prompt, params, float(index))
            root = cache.digests.root(None)
            scheduler.add(Sequence(request, facts, root, 0))
        ended: dict[str, Any] = {}
        for _ in range(5000):
            plan = scheduler.plan()
            if plan is None:
                break
            done = scheduler.commit(StepResult(plan.id, [7] * sum(plan.samples)))
            ended |= {o.id: o.finish_reason for o in done if o.finish_reason is not None}
        return ended
