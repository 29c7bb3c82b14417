"""What an episode is made of, drawn from its seed: engine, requests, what goes wrong and when."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from simulator.model import EOS, VOCAB, text_of
from treadle.api.sampling_params import SamplingParams, StructuredOutputsParams

__all__ = ("FAULTS", "Plan", "Setup")

FAULTS = {
    "none": 40, "kill": 9, "cut": 5, "garbage": 4, "worker": 7, "hang": 5, "start": 3,
    "start_kill": 3, "steps": 9, "rows": 9, "shutdown": 6,
}  # fmt: skip
"""Faults by weight; at most one kind in an episode, besides what grammars and clients do."""

GRAMMARS = ("plain",) * 5 + ("slow", "slow", "endless", "stuck", "refused", "wrong")


@dataclass
class Setup:
    """The engine of an episode."""

    windows: list[int | None]
    page_size: int
    num_pages: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill_size: int | None
    max_step_ms: float | None
    scheduling_policy: str
    num_async_steps: int
    enable_prefix_caching: bool
    max_num_queued_reqs: int
    max_num_queued_grammars: int
    fault: str
    fault_after: float
    starts_first: bool
    tick: float
    """Clients act at multiples of it, and so at the same time as others; 0 for any time."""
    plans: list[Plan]
    process: Any = field(default=None, repr=False)
    is_hanging: bool = False

    @property
    def fails_to_start(self) -> bool:
        return self.fault == "start"

    @property
    def step_faults(self) -> bool:
        return self.fault == "steps"

    @property
    def row_faults(self) -> bool:
        return self.fault == "rows"

    def moment(self, seconds: float) -> float:
        return round(seconds / self.tick) * self.tick if self.tick else seconds

    @classmethod
    def draw(cls, random: Random) -> Setup:
        page_size = random.choice([1, 2, 4, 4, 4, 8])
        windows = random.choice([[None], [None], [None], [None, 6], [9]])
        max_len = random.choice([24, 40, 64])
        least = -(-max_len // page_size) + 1
        num_pages = least + random.choice([1, 2, least // 2, least * 2, least * 8])
        policy = random.choice(["fcfs", "fcfs", "priority"])
        fault = random.choices(list(FAULTS), list(FAULTS.values()))[0]
        setup = cls(
            windows=windows,
            page_size=page_size,
            num_pages=num_pages,
            max_model_len=max_len,
            max_num_seqs=random.choice([1, 2, 4, 6, 12]),
            max_num_batched_tokens=random.choice([1, 3, 7, 16, 64]),
            chunked_prefill_size=random.choice([None, None, 2, 5]),
            max_step_ms=random.choice([None, 0, 2, 10]),
            scheduling_policy=policy,
            num_async_steps=random.choice([0, 1]),
            enable_prefix_caching=random.random() < 0.85,
            max_num_queued_reqs=random.choice([2, 8, 10_000, 10_000]),
            max_num_queued_grammars=random.choice([1, 2, 1000, 1000]),
            fault=fault,
            fault_after=random.random() * random.choice([0.02, 0.5, 2.0]),
            starts_first=random.random() < 0.7,
            tick=random.choice([0.0, 0.0, 0.01]),
            plans=[],
        )
        prefixes = [[random.randrange(VOCAB - 1) for _ in range(max_len - 10)] for _ in range(3)]
        seconds = random.choice([0.05, 0.5, 2.0])
        setup.plans = [
            Plan.draw(random, setup, prefixes, number, seconds)
            for number in range(random.choice([4, 12, 30]))
        ]
        return setup


@dataclass
class Plan:
    """A request, and what its client does with it. Times are seconds after its arrival."""

    number: int
    arrival: float
    prompt_ids: list[int]
    prompt: Any
    params: SamplingParams
    priority: int | None
    request_id: str | None
    in_halves: bool
    cancel_after: float | None = None
    abort_after: float | None = None
    leave_after: int | None = None
    pause: float = 0.0
    grammar: str | None = None
    events: list[str] = field(default_factory=list)

    @classmethod
    def draw(
        cls, random: Random, setup: Setup, prefixes: list[list[int]], number: int, seconds: float
    ) -> Plan:
        draw = random.random
        prefix = random.choice(prefixes)[: random.randrange(setup.max_model_len - 9)]
        prompt_ids = prefix + [random.randrange(VOCAB) for _ in range(random.randrange(1, 8))]
        prompt: Any = prompt_ids
        values: dict[str, Any] = {
            "max_tokens": random.choice([1, 2, 5, 12, 12, None]),
            "n": random.choice([1, 1, 1, 1, 2, 3]),
            "cache_salt": random.choice([None, None, None, "a", "b"]),
            "seed": random.choice([None, None, 5]),
            "output_kind": random.choice(["cumulative", "delta", "final"]),
            "logprobs": random.choice([None, None, None, 0, 3]),
            "prompt_logprobs": random.choice([None, None, None, None, 1]),
        }
        if values["max_tokens"] is not None:
            values["ignore_eos"] = draw() < 0.5
        if draw() < 0.25:
            values["stop"] = [
                "".join(random.choice("abcdefgh") for _ in range(random.choice([1, 2, 3])))
                for _ in range(random.choice([1, 3]))
            ]
            values["include_stop_str_in_output"] = draw() < 0.5
        if draw() < 0.2:
            values["stop_token_ids"] = [random.randrange(EOS) for _ in range(8)]
        grammar = None
        if draw() < 0.2:
            grammar = random.choice(GRAMMARS)
            source = f"{grammar}-{random.choice([0, 2])}-{random.choice([3, 8])}"
            values["structured_outputs"] = StructuredOutputsParams(regex=source)
        elif draw() < 0.2 and values["max_tokens"] is not None:
            values["min_tokens"] = random.randrange(values["max_tokens"] + 1)
        if EOS not in prompt_ids and draw() < 0.4:
            prompt = text_of(prompt_ids)
            if draw() < 0.2:  # long enough for a thread, then cut
                values["truncate_prompt_tokens"] = len(prompt_ids)
                prompt = "ab" * 600 + prompt
        plan = cls(
            number=number,
            arrival=setup.moment(draw() * seconds),
            prompt_ids=prompt_ids,
            prompt=prompt,
            params=SamplingParams(**values),
            priority=random.randrange(3) if setup.scheduling_policy == "priority" else None,
            request_id=random.choice([None, f"mine-{number}", f"shared-{number % 3}"]),
            in_halves=draw() < 0.3,
            grammar=grammar,
        )
        action = draw()
        if action < 0.2:
            plan.cancel_after = setup.moment(draw() * random.choice([0.0, 0.001, 0.05, 0.5]))
        elif action < 0.3:
            plan.leave_after = random.randrange(4)
        elif action < 0.4:
            plan.abort_after = setup.moment(draw() * random.choice([0.01, 0.3]))
        if draw() < 0.15:
            plan.pause = random.choice([0.001, 0.05])
        return plan
