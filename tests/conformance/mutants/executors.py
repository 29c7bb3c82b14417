"""An executor that hands every call on to ``uni``, and what may be wrong with one."""

from __future__ import annotations

from mutants.specimen import Mutant, Specimen
from treadle.testing.executors import ExecutorSuite

SOURCE = """
import threading

from treadle.api import impl
from treadle.api.kinds import EXECUTORS
from treadle.api.types import ModelRunnerOutput
from treadle.errors import TreadleError

TREADLE = {"executors": ["mine"]}


class Mine:
    started = False
    steps = 0

    def __init__(self, inner):
        self.inner = inner
        self.order = []

    def start(self):
        self.started = True
        return self.inner.start()

    def execute_model(self, scheduler_output):
        self.steps += 1
        self.inner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output):
        self.inner.sample_tokens(grammar_output)

    def get_output(self):
        return self.inner.get_output()

    def check_health(self):
        self.inner.check_health()

    def shutdown(self):
        self.inner.shutdown()


@impl
def treadle_executor(name, config, plugins):
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
                    "return self.inner.get_output()": """result = self.inner.get_output()
        return ModelRunnerOutput(result.id, result.sampled_token_ids[::-1], error=result.error)"""
                },
            ),
            Mutant(
                "test_its_tokens_are_those_of_one_process",
                {"self.inner.check_health()": "raise TreadleError('idle')"},
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
                {
                    "self.inner.shutdown()": "self.started or self.nothing\n        self.inner.shutdown()"
                },
            ),
            Mutant(
                "test_results_come_in_the_order_of_launches",
                {
                    "self.inner.execute_model(scheduler_output)": "self.order.append(self.inner.execute_model(scheduler_output))",
                    "return self.inner.get_output()": """while self.order:
            self.order.pop()
            self.done = [self.inner.get_output(), *vars(self).get("done", [])]
        return self.done.pop(0)""",
                },
            ),
            Mutant(
                "test_a_deferred_step_is_completed_by_sample",
                {"self.inner.sample_tokens(grammar_output)": "self.inner.sample_tokens(None)"},
            ),
            Mutant(
                "test_a_step_that_fails_is_said_so",
                {
                    "return self.inner.get_output()": """result = self.inner.get_output()
        return ModelRunnerOutput(result.id, result.sampled_token_ids or [0], result.logprobs)"""
                },
            ),
            Mutant(
                "test_a_step_that_fails_is_said_so",
                {
                    "return self.inner.get_output()": """result = self.inner.get_output()
        if result.error:
            raise RuntimeError(result.error)
        return result"""
                },
            ),
            Mutant(
                "test_two_executors_share_nothing",
                {
                    "        self.inner.execute_model(scheduler_output)": """        Mine.last = self
        self.inner.execute_model(scheduler_output)""",
                    "return self.inner.get_output()": "return Mine.last.inner.get_output()",
                },
            ),
            Mutant(
                "test_it_leaves_nothing_behind",
                {
                    "        self.started = True\n": """        self.started = True
        self.done = threading.Event()
        threading.Thread(target=self.done.wait, args=(5,), daemon=True).start()
"""
                },
            ),
            Mutant(
                "test_it_leaves_nothing_behind",
                {
                    "import threading": "import os",
                    "        self.started = True\n": """        self.started = True
        os.posix_spawn("/bin/sleep", ["sleep", "1"], {})
""",
                },
            ),
        ),
    ),
)
