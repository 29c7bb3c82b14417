"""Scheduler and page pool driven at random on a fake runner, for thousands of steps.

Every step checks the pool's integrity; every finished sequence is compared with an oracle that
has endless memory and no neighbours, so a foreign, stale or missing page shows as a wrong token.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings

from treadle.api.requests import EngineRequest, TokenOutput
from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import EngineInfo, KVCacheGroup
from treadle.cache import KVCacheManager
from treadle.config import SchedulerConfig
from treadle.scheduler.policies import FirstCome, Priority
from treadle.scheduler.queue import WaitingQueue
from treadle.scheduler.scheduler import Scheduler
from treadle.scheduler.sequence import SequenceState

spec = importlib.util.spec_from_file_location(
    "fake_runner", Path(__file__).parent / "fake_runner.py"
)
fake: Any = importlib.util.module_from_spec(spec)
sys.modules["fake_runner"] = fake
spec.loader.exec_module(fake)

# Of each variant; --hypothesis-profile=thorough takes more.
STEPS = 80 * settings().max_examples
PAGE = 4
MAX_LEN = 48


@dataclass
class Scenario:
    windows: list[int | None]
    pages: int
    depth: int
    policy: Any
    budget: int
    chunk: int | None = None
    caching: bool = True
    jumps: bool = False
    max_seqs: int = 6
    faults: list[str] = field(default_factory=list)


SCENARIOS = {
    "roomy": Scenario([None], 120, 0, FirstCome(), 32),
    "tight": Scenario([None], 16, 0, FirstCome(), 16),
    "tight-async": Scenario([None], 16, 1, FirstCome(), 16),
    "priority-async": Scenario([None], 18, 1, Priority(), 7),
    "window-async": Scenario([9], 14, 1, FirstCome(), 16),
    "two-groups-async": Scenario([None, 6], 20, 1, FirstCome(), 8, chunk=5),
    "no-prefix-cache": Scenario([None], 16, 1, FirstCome(), 16, caching=False),
    "jumps": Scenario([None], 16, 0, FirstCome(), 16, jumps=True),
    "jumps-priority": Scenario([None], 16, 0, Priority(), 9, jumps=True),
    "jumps-two-groups": Scenario([None, 6], 20, 0, FirstCome(), 8, chunk=3, jumps=True),
}


class Forcing:
    """The state of a grammar that forces tokens, of one sequence."""

    has_ended, error, unenforced = False, None, None

    def __init__(self, sequence: SequenceState) -> None:
        self.sequence = sequence
        self.accepted: list[int] = []

    def forced_tokens(self) -> list[int]:
        tokens: list[int] = fake.forced_after(self.sequence.token_ids[-1])
        return tokens

    def accept_token(self, token: int) -> None:
        self.accepted.append(token)


class Driver:
    """Arrivals, aborts and steps at random; the oracle's answer for every sequence."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.random = random.Random(seed)
        self.scenario = scenario
        groups = [KVCacheGroup("full", w, scenario.pages, 1, 1) for w in scenario.windows]
        self.info = EngineInfo(
            model="fake", architecture="fake", dtype="float32", device="cpu", vocab_size=fake.VOCAB,
            max_model_len=MAX_LEN, page_size=PAGE, kv_cache_groups=groups, num_async_steps=scenario.depth, eos_token_ids=[],
        )  # fmt: skip
        config = SchedulerConfig(
            max_num_seqs=scenario.max_seqs,
            max_num_batched_tokens=scenario.budget,
            chunked_prefill_size=scenario.chunk,
        )
        self.cache = KVCacheManager(groups, PAGE, prefix_caching=scenario.caching)
        self.scheduler = Scheduler(config, self.cache, scenario.policy, [])
        self.runner = fake.FakeRunner(groups, PAGE, scenario.max_seqs)
        self.expected: dict[str, list[int]] = {}
        self.got: dict[str, list[int]] = {}
        self.prompt_lens: dict[str, int] = {}
        self.born: dict[str, int] = {}
        self.finished: dict[str, str] = {}
        self.now = 0
        self.count = 0
        self.longest_wait = 0
        self.prompts = [[self.random.randrange(fake.VOCAB) for _ in range(30)] for _ in range(3)]

    def arrive(self) -> None:
        # Most prompts begin like another one, so that pages are shared.
        shared = self.random.choice(self.prompts)[: self.random.randrange(31)]
        prompt = shared + [
            self.random.randrange(fake.VOCAB) for _ in range(self.random.randrange(1, 8))
        ]
        count = self.random.randrange(1, min(14, MAX_LEN - len(prompt)))
        salt = self.random.choice([None, None, "a", "bb"])
        siblings = self.random.choice([1, 1, 1, 3])
        leader = None
        for _ in range(siblings):
            self.count += 1
            name = f"r{self.count}"
            params = SamplingParams(
                max_tokens=count,
                cache_salt=salt,
                priority=self.random.randrange(3),
                prompt_logprobs=self.random.choice([None, None, 1]),
            )
            request = EngineRequest(name, prompt, params, float(self.now), prefix_leader=leader)
            leader = leader or name
            root = self.cache.page_hasher.root_hash(salt)
            sequence = SequenceState(request, self.info, root, seed=0)
            if self.scenario.jumps:
                state: Any = Forcing(sequence)
                sequence.grammar_state = state
            self.scheduler.add(sequence)
            if params.prompt_logprobs:
                self.prompt_lens[name] = len(prompt)
            self.expected[name] = fake.oracle(
                prompt, salt, self.scenario.windows, count, self.scenario.jumps
            )
            self.got[name] = []
            self.born[name] = self.now

    def abort(self) -> None:
        if self.scheduler.sequences:
            name = self.random.choice(sorted(self.scheduler.sequences))
            assert self.scheduler.abort(name)
            self.finished[name] = "abort"

    def step(self) -> None:
        self.now += 1
        scheduler_output = self.scheduler.schedule()
        assert not self.scheduler.pending_outputs
        if scheduler_output is not None:
            assert sum(scheduler_output.num_scheduled_tokens) <= self.scenario.budget
            assert len(scheduler_output.slots) <= self.scenario.max_seqs
            decodes = scheduler_output.num_computed_tokens[: scheduler_output.num_decodes]
            assert decodes == sorted(decodes, reverse=True)  # the longest row first
            assert all(s.num_tokens <= s.max_num_tokens for s in self.scheduler.running)
            self.runner.execute_model(scheduler_output)
        if self.scheduler.in_flight > (self.scenario.depth if scheduler_output is not None else 0):
            for output in self.scheduler.update_from_output(self.runner.get_output()):
                self.receive(output)
        faults = self.scheduler.check_integrity()
        assert not faults, faults

    def receive(self, output: TokenOutput) -> None:
        assert output.id not in self.finished, "output for a sequence that has ended"
        if not self.got[output.id] and output.id in self.prompt_lens:
            assert output.prompt_logprobs == list(range(1, self.prompt_lens[output.id]))
        is_first = not self.got[output.id]
        assert (output.scheduled_time is not None) == is_first, "said once, after preemptions too"
        self.got[output.id] += output.token_ids
        if output.finish_reason is not None:
            assert output.finish_reason == "length"
            self.finished[output.id] = "length"
            assert self.got[output.id] == self.expected[output.id]
            self.longest_wait = max(self.longest_wait, self.now - self.born[output.id])


def test_sequences_with_equal_keys_wait_in_the_order_of_their_arrival() -> None:
    driver, queue = Driver(next(iter(SCENARIOS.values())), seed=1), WaitingQueue()
    while len(driver.scheduler.sequences) < 5:
        driver.arrive()
    for sequence in driver.scheduler.sequences.values():
        sequence.sort_key = (0.0,)
        queue.push(sequence)
    assert [queue.pop().id for _ in range(len(queue))] == list(driver.scheduler.sequences)


def test_an_invalid_row_of_an_aborted_sequence_is_ignored() -> None:
    driver = Driver(next(iter(SCENARIOS.values())), seed=1)
    driver.arrive()
    while (step := driver.scheduler.schedule()) is not None and not any(step.needs_sampling):
        driver.runner.execute_model(step)
        driver.scheduler.update_from_output(driver.runner.get_output())
    assert step is not None
    driver.runner.execute_model(step)
    for name in list(driver.scheduler.sequences):
        driver.scheduler.abort(name)
    result = driver.runner.get_output()
    rows = list(range(len(result.sampled_token_ids)))
    result = msgspec.structs.replace(result, invalid_rows=rows)
    assert rows and driver.scheduler.update_from_output(result) == []


@pytest.mark.parametrize("name", SCENARIOS)
def test_random_steps(name: str) -> None:
    driver = Driver(SCENARIOS[name], seed=sum(map(ord, name)))
    while driver.now < STEPS:
        chance = driver.random.random()
        if chance < 0.25 and len(driver.scheduler.waiting) < 12:
            driver.arrive()
        elif chance < 0.28:
            driver.abort()
        driver.step()
    finished_by = driver.now + 3000
    while driver.scheduler.has_work or driver.scheduler.in_flight:
        driver.step()
        assert driver.now < finished_by, "a sequence starves"
    assert set(driver.finished) == set(driver.expected)
    assert all(pool.num_used == 0 for pool in driver.cache.pools), "a page leaked"
    assert sum(reason == "length" for reason in driver.finished.values()) > STEPS / 100
    # The scenario did what it is there for.
    counters = driver.scheduler.counters
    if driver.scenario.caching:
        assert counters.prefix_cache_hits > 0
    if driver.scenario.pages <= 16:
        assert counters.num_preemptions > 0
    if not isinstance(driver.scenario.policy, Priority):
        assert driver.longest_wait < 2000


def test_the_oracle_bites() -> None:
    """A cache that shares a page under the wrong name is found."""
    driver = Driver(SCENARIOS["roomy"], seed=1)
    digests = driver.cache.page_hasher
    digests.root_hash = lambda salt=None: b"everybody's"  # type: ignore[method-assign]
    with pytest.raises((fake.ForeignRead, AssertionError)):
        for _ in range(500):
            driver.arrive()
            driver.step()
