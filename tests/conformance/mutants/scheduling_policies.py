"""A policy that serves whoever came first, and what may be wrong with one."""

from __future__ import annotations

from mutants.specimen import SHARED, Mutant, Specimen
from treadle.testing.policies import PolicySuite

SOURCE = """
from treadle.api import impl

TREADLE = {"scheduling_policies": ["mine"]}


class Mine:
    calls = 0

    def sort_key(self, request):
        return (request.arrival_time,)

    def select_victim(self, running):
        self.calls += 1
        return max(range(len(running)), key=lambda i: running[i].arrival_time)


@impl
def treadle_scheduling_policy(name: str):
    return Mine() if name == "mine" else None
"""

SPECIMENS = (
    Specimen(
        suite=PolicySuite,
        plugin="scheduling_policies:mine",
        source=SOURCE,
        mutants=(
            Mutant("test_two_builds_are_two_objects", SHARED),
            Mutant(
                "test_orders_are_numbers_that_compare",
                {"(request.arrival_time,)": "[request.arrival_time]"},
            ),
            Mutant(
                "test_the_order_of_a_waiting_request_is_constant",
                {"(request.arrival_time,)": "(request.arrival_time, self.calls)"},
            ),
            Mutant(
                "test_of_two_alike_the_earlier_goes_first",
                {"(request.arrival_time,)": "(request.arrival_time // 1000,)"},
            ),
            Mutant(
                "test_nobody_waits_for_ever",
                {"(request.arrival_time,)": "(request.num_prompt_tokens, request.arrival_time)"},
            ),
            Mutant(
                "test_a_victim_is_one_of_those_that_run",
                {"return max(": "return len(running) - 1 and -1 * max("},
            ),
            Mutant(
                "test_the_running_are_left_as_they_are",
                {
                    "        return max": "        if isinstance(running, list):  # the engine passes a tuple\n"
                    "            running.sort(key=lambda r: r.arrival_time)\n        return max"
                },
            ),
            Mutant(
                "test_all_requests_end_when_pages_run_out",
                {"self.calls += 1": "if running[0].num_prompt_tokens == 4: raise OSError"},
            ),
        ),
    ),
)
