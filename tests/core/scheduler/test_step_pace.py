"""Prompts are cut by time: machines with a known cost of a step, on a clock of their own."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import (
    EngineInfo,
    KVCacheGroup,
    ModelRunnerOutput,
    SchedulerOutput,
)
from treadle.cache import KVCacheManager
from treadle.config import SchedulerConfig
from treadle.scheduler import step_pace
from treadle.scheduler.policies import FirstCome
from treadle.scheduler.scheduler import Scheduler
from treadle.scheduler.sequence import SequenceState
from treadle.scheduler.step_pace import ALONE_FACTOR, MIN_CHUNK, StepPace

PAGE, MAX_LEN = 16, 16384
Cost = tuple[float, float, float, float, float, float]
# Seconds of a step, a row, a prompt token, a cached token read, a prompt token times a cached one, and of
# any prompts at all.
MACHINES: dict[str, tuple[float, Cost]] = {
    "small model on a CPU": (0.25, (5e-3, 2e-3, 5e-3, 1e-6, 4e-7, 0.0)),
    "8B on a GPU": (0.04, (5e-3, 2e-5, 3.3e-5, 1e-8, 1e-9, 0.0)),
    "8B with graphs of generation": (0.04, (4e-3, 1e-5, 2.1e-5, 1e-9, 2e-11, 12e-3)),
    "70B on GPUs": (0.04, (15e-3, 2e-5, 2e-4, 1e-8, 4e-9, 0.0)),
}


class Machine:
    """A scheduler and a device that takes exactly the time of ``cost`` for a step."""

    now = 0.0

    def __init__(
        self, patch: pytest.MonkeyPatch, bound: float, cost: Cost, depth: int = 0,
        first_chunk: int = MIN_CHUNK, graph_tokens: int = 0, **limits: Any,
    ) -> None:  # fmt: skip
        patch.setattr(step_pace, "time", SimpleNamespace(perf_counter=lambda: self.now))
        groups = [KVCacheGroup("full", None, 20_000, 1, 1)]
        self.info = EngineInfo(
            model="fake", architecture="fake", dtype="float32", device="cpu", vocab_size=9, eos_token_ids=[],
            max_model_len=MAX_LEN, page_size=PAGE, kv_cache_groups=groups, num_async_steps=depth,
        )  # fmt: skip
        cache = KVCacheManager(groups, PAGE, prefix_caching=False)
        config = SchedulerConfig(**limits)
        pace = StepPace(bound, first_chunk, graph_tokens)
        self.scheduler = Scheduler(config, cache, FirstCome(), [], pace)
        self.graph_tokens = graph_tokens
        self.bound, self.cost = bound, cost
        self.device: list[tuple[float, ModelRunnerOutput]] = []
        self.steps: list[SchedulerOutput] = []
        self.ends: dict[str, float] = {}
        self.firsts: dict[str, float] = {}

    def add(self, name: str, length: int, count: int) -> None:
        request = EngineRequest(name, [1] * length, SamplingParams(max_tokens=count), self.now)
        self.scheduler.add(SequenceState(request, self.info, b"", seed=0))

    def seconds(self, step: SchedulerOutput, num_rows: int | None = None) -> float:
        """The time of a step, or of its first rows."""
        units = [1.0, 0, 0, 0, 0, 0]
        rows = list(zip(step.num_computed_tokens, step.num_scheduled_tokens, strict=True))
        for row, (start, count) in enumerate(rows[:num_rows]):
            is_prompt = row >= step.num_decodes
            units[1] += 1
            units[2] += count * is_prompt
            units[3] += start + count * is_prompt
            units[4] += count * (start + count / 2) * is_prompt
            is_launched = sum(step.num_scheduled_tokens) > self.graph_tokens
            units[5] = max(units[5], is_prompt and is_launched)
        return math.sumprod(self.cost, units) if hasattr(math, "sumprod") else sum(
            a * b for a, b in zip(self.cost, units, strict=True)
        )  # fmt: skip

    def step(self, extra_seconds: float = 0.0) -> SchedulerOutput | None:
        output = self.scheduler.schedule()
        if output is not None:
            self.check(output)
            self.steps.append(output)
            begin = max(self.now, self.device[-1][0]) if self.device else self.now
            tokens = [7] * sum(output.needs_sampling)
            end = begin + self.seconds(output) + extra_seconds
            self.device.append((end, ModelRunnerOutput(output.id, tokens)))
        if len(self.device) > (self.info.num_async_steps if output is not None else 0):
            end, result = self.device.pop(0)
            self.now = max(self.now, end)
            for token in self.scheduler.update_from_output(result):
                self.firsts.setdefault(token.id, self.now)
                if token.finish_reason is not None:
                    self.ends[token.id] = self.now
        return output

    def check(self, output: SchedulerOutput) -> None:
        """A step is within its bound as far as the scheduler can know, but for a chunk of 16."""
        pace, step = self.scheduler.pace, self.scheduler._in_flight[-1]
        if not self.bound:
            return
        work = [1.0, output.num_decodes, 0.0, sum(output.num_computed_tokens[: output.num_decodes]), 0.0, 0.0]  # fmt: skip
        generation = pace.seconds(work)
        bound = self.bound * (1 if output.num_decodes else ALONE_FACTOR)
        chunks = list(
            zip(output.num_computed_tokens, output.num_scheduled_tokens, strict=True)
        )[output.num_decodes :]  # fmt: skip
        start, count = chunks[-1] if chunks else (0, 0)
        slack = pace.seconds([0, 1, count, start + count, count * (start + count / 2), 1]) * (
            count <= MIN_CHUNK
        )
        predicted = pace.seconds(step.work)
        assert predicted <= max(bound, generation + bound / 2, generation) * 1.000001 + slack

    def run(self, limit: int = 100_000) -> None:
        while self.scheduler.has_work or self.device:
            self.step()
            assert len(self.steps) < limit, "a request starves"


def streams(machine: Machine, num: int = 16) -> None:
    """``num`` sequences that generate, and a machine that is known."""
    for i in range(num):
        machine.add(f"s{i}", 200, 1500)
    while len(machine.firsts) < num:
        machine.step()
    for _ in range(20):
        machine.step()
    machine.steps.clear()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", MACHINES)
def test_a_long_prompt_delays_no_token(
    name: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound, cost = MACHINES[name]
    machine = Machine(monkeypatch, bound, cost, depth)
    streams(machine)
    machine.add("long", 8100, 2)
    machine.run()
    assert len(machine.ends) == 17
    mixed = [s for s in machine.steps if len(s.slots) > s.num_decodes]
    seconds = [machine.seconds(s) for s in mixed]
    assert max(seconds) <= 1.1 * bound
    # It is not cut for nothing, either: on average the steps use most of their time.
    assert sum(seconds) / len(seconds) > 0.6 * bound
    assert sum(s.num_scheduled_tokens[-1] for s in mixed) == 8100


def test_without_a_bound_a_prompt_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    bound, cost = MACHINES["small model on a CPU"]
    machine = Machine(monkeypatch, 0.0, cost)
    streams(machine)
    machine.add("long", 8100, 2)
    machine.step()
    assert machine.steps[-1].num_scheduled_tokens[-1] == 8100
    assert machine.seconds(machine.steps[-1]) > 100 * bound


def test_a_short_prompt_overtakes_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, *MACHINES["small model on a CPU"])
    for alone in (False, True):
        if not alone:
            streams(machine, 4)
        else:
            machine.run()
        machine.add(f"long-{alone}", 8000, 2)
        for _ in range(5):
            machine.step()
        arrival = machine.now
        machine.add(f"short-{alone}", 50, 2)
        while f"long-{alone}" not in machine.firsts:
            machine.step()
        wait = machine.firsts[f"short-{alone}"] - arrival
        assert wait < (machine.firsts[f"long-{alone}"] - arrival) / 5


def test_generation_beyond_the_bound_leaves_time_for_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, 0.1, (0.2, 1e-3, 2e-4, 1e-7, 1e-9, 0.0))
    streams(machine)
    machine.add("long", 12_000, 2)
    machine.run()
    chunks = [s.num_scheduled_tokens[-1] for s in machine.steps if len(s.slots) > s.num_decodes]
    assert sum(chunks) / len(chunks) > 4 * MIN_CHUNK


def test_a_step_that_stalls_once_does_not_cut_those_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, *MACHINES["small model on a CPU"])
    streams(machine, 4)
    machine.add("long", 16_000, 2)
    sizes: list[int] = []
    for i in range(120):
        step = machine.step(extra_seconds=60.0 if i == 40 else 0.0)
        assert step is not None
        sizes.append(step.num_scheduled_tokens[-1])
    assert all(size >= sizes[40] / 4 for size in sizes[41:])
    assert sizes[-1] >= 0.7 * sizes[40]


def test_what_prompts_cost_beside_their_tokens_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of generation replays a graph, and teaches nothing of the cost of a prompt."""
    bound, cost = MACHINES["8B with graphs of generation"]
    machine = Machine(monkeypatch, bound, cost, 1, 2048)
    streams(machine)
    for i in range(40):
        machine.add(f"short{i}", 64, 2)
        for _ in range(40):
            machine.step()
    weights = machine.scheduler.pace.weights
    assert cost[0] / 1.5 < weights[0] < cost[0] * 1.5
    assert cost[5] / 1.5 < weights[5] < cost[5] * 1.5


def test_a_fast_device_begins_with_large_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, *MACHINES["8B with graphs of generation"], 1, 2048)
    for i in range(4):
        machine.add(f"first{i}", 1024, 32)
    machine.step()
    assert machine.steps[0].num_scheduled_tokens == [1024] * 4


@pytest.mark.parametrize(
    ("graph", "length", "counts"), [(0, 300, {MIN_CHUNK}), (512, 300, {300}), (512, 4000, {496})]
)
def test_what_fits_a_graph_needs_no_time_for_launches(
    monkeypatch: pytest.MonkeyPatch, graph: int, length: int, counts: set[int]
) -> None:
    """Launching takes longer than a step may; a chunk that a graph holds is not launched."""
    machine = Machine(monkeypatch, 0.012, (0.001, 1e-5, 1e-5, 1e-9, 1e-11, 0.1), 1, 2048, graph)
    streams(machine)
    machine.scheduler.pace.weights[5] = 0.1
    machine.add("prompt", length, 2)
    while "prompt" not in machine.firsts:
        machine.step()
    chunks = [step for step in machine.steps if step.tokens]
    assert counts <= {step.num_scheduled_tokens[-1] for step in chunks}


def test_chunks_end_at_multiples(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, *MACHINES["8B on a GPU"])
    machine.add("long", 8100, 1)
    machine.run()
    assert len(machine.steps) > 3
    assert all(s.num_scheduled_tokens[-1] % MIN_CHUNK == 0 for s in machine.steps[:-1])


weights = st.tuples(
    *(
        st.floats(low, high).map(lambda exponent: 10.0**exponent)
        for low, high in ((-4, 0), (-6, -2), (-6, -1), (-9, -5), (-11, -6), (-4, -1))
    )
)
arrivals = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 800), st.integers(1, 20)), min_size=1, max_size=6
)


@given(
    cost=weights,
    bound=st.sampled_from([0.001, 0.04, 0.25, 2.0]),
    depth=st.sampled_from([0, 1]),
    requests=arrivals,
    chunk=st.sampled_from([None, 7, 500]),
    slots=st.sampled_from([2, 256]),
    graph=st.sampled_from([0, 40, 512]),
)
def test_any_machine(
    cost: Cost, bound: float, depth: int, requests: list[Any], chunk: int | None, slots: int, graph: int
) -> None:  # fmt: skip
    """The bound holds by what is known at each step, and every request ends."""
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(
            patch, bound, cost, depth, MIN_CHUNK, graph, chunked_prefill_size=chunk, max_num_seqs=slots
        )  # fmt: skip
        for number, (steps, length, count) in enumerate(requests):
            machine.add(str(number), length, count)
            for _ in range(steps):
                machine.step()
        machine.run()
        assert len(machine.ends) == len(requests)
        assert not machine.scheduler.check_integrity()
        weights = machine.scheduler.pace.weights
        assert all(weight > 0 and math.isfinite(weight) for weight in weights)


def test_those_who_generate_wait_for_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = (1e-3, 1e-5, 2e-6, 1e-8, 1e-11, 15e-3)
    machine = Machine(
        monkeypatch, 0.04, cost, depth=1, first_chunk=2048, graph_tokens=2048, max_num_seqs=32
    )
    for number in range(40):
        machine.add(str(number), 3000, 20)
    machine.run()
    tokens = [(step.num_decodes, sum(step.num_scheduled_tokens)) for step in machine.steps]
    assert max(count for decodes, count in tokens if not decodes) > 2048
    assert max(count for decodes, count in tokens if decodes) == 2048
