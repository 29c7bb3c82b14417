"""An executor that hands every call on to ``uni``, and what may be wrong with one."""

from __future__ import annotations

from mutants.specimen import Mutant, Specimen
from treadle.testing.executors import ExecutorSuite

SOURCE = """
import threading

from treadle.api import impl
from treadle.api.kinds import EXECUTORS
from treadle.api.types import StepResult
from treadle.errors import TreadleError

TREADLE = {"executors": ["mine"]}


class Mine:
    began = False
    steps = 0

    def __init__(self, inner):
        self.inner = inner
        self.order = []

    def start(self):
        self.began = True
        return self.inner.start()

    def launch(self, plan):
        self.steps += 1
        self.inner.launch(plan)

    def sample(self, edits):
        self.inner.sample(edits)

    def collect(self):
        return self.inner.collect()

    def check(self):
        self.inner.check()

    def stop(self):
        self.inner.stop()


@impl
def treadle_executor(name, config, host):
    if name != "mine":
        return None
    return Mine(plugins.create(EXECUTORS, "uni", config=config, plugins=plugins))
"""

SPECIMENS = (
    Specimen(
        suite=ExecutorSuite,
        plugin="executors:mine",
        source=SOURCE,
        mutants=(
            Mutant(
                "test_its_tokens_are_those_of_one_process",
                {
                    "return self.inner.collect()": """result = self.inner.collect()
        return StepResult(result.id, result.tokens[::-1], error=result.error)"""
                },
            ),
            Mutant(
                "test_its_tokens_are_those_of_one_process",
                {"self.inner.check()": "raise TreadleError('idle')"},
                also=frozenset({"test_two_executors_share_nothing"}),
                why="both look whether the executor is still there",
            ),
            Mutant(
                "test_a_failed_start_is_an_error_of_treadle",
                {
                    "return self.inner.start()": """try:
            return self.inner.start()
        except TreadleError as error:
            raise RuntimeError("no start") from error"""
                },
            ),
            Mutant(
                "test_it_may_be_stopped_without_a_start",
                {"self.inner.stop()": "self.began or self.nothing\n        self.inner.stop()"},
            ),
            Mutant(
                "test_results_come_in_the_order_of_launches",
                {
                    "self.inner.launch(plan)": "self.order.append(self.inner.launch(plan))",
                    "return self.inner.collect()": """while self.order:
            self.order.pop()
            self.done = [self.inner.collect(), *vars(self).get("done", [])]
        return self.done.pop(0)""",
                },
            ),
            Mutant(
                "test_a_held_step_is_completed_by_sample",
                {"self.inner.sample(edits)": "self.inner.sample(None)"},
            ),
            Mutant(
                "test_a_step_that_fails_is_said_so",
                {
                    "return self.inner.collect()": """result = self.inner.collect()
        return StepResult(result.id, result.tokens or [0], result.logprobs)"""
                },
            ),
            Mutant(
                "test_a_step_that_fails_is_said_so",
                {
                    "return self.inner.collect()": """result = self.inner.collect()
        if result.error:
            raise RuntimeError(result.error)
        return result"""
                },
            ),
            Mutant(
                "test_two_executors_share_nothing",
                {
                    "        self.inner.launch(plan)": """        Mine.last = self
        self.inner.launch(plan)""",
                    "return self.inner.collect()": "return Mine.last.inner.collect()",
                },
            ),
            Mutant(
                "test_it_leaves_nothing_behind",
                {
                    "        self.began = True\n": """        self.began = True
        self.done = threading.Event()
        threading.Thread(target=self.done.wait, args=(5,), daemon=True).start()
"""
                },
            ),
            Mutant(
                "test_it_leaves_nothing_behind",
                {
                    "import threading": "import os",
                    "        self.began = True\n": """        self.began = True
        os.posix_spawn("/bin/sleep", ["sleep", "1"], {})
""",
                },
            ),
        ),
    ),
)
