"""The interfaces of policies, executors, logits processors and other plugins of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.api.stats import EngineStats
    from treadle.api.step_types import EngineInfo, GrammarOutput, ModelRunnerOutput, SchedulerOutput

__all__ = ("Executor", "LogitsProcessor", "QueuedRequest", "SchedulingPolicy", "StatLogger")


class QueuedRequest(Protocol):
    """The part of a request that a scheduling policy may read."""

    @property
    def id(self) -> str: ...
    @property
    def arrival_time(self) -> float:
        """Time of arrival, in seconds of the engine's monotonic clock."""

    @property
    def priority(self) -> int:
        """Requests with lower values are served first."""

    @property
    def client(self) -> str:
        """Whose it is: in a server the digest of the API key, or the address; else empty."""

    @property
    def extra_args(self) -> Mapping[str, Any]:
        """Those of the sampling parameters. What is under the name of the policy is for it."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...


class SchedulingPolicy(Protocol):
    """Chooses the order of admission and which request to preempt."""

    def sort_key(self, request: QueuedRequest) -> tuple[float, ...]:
        """Return the sort key of a waiting request. It is constant; the smallest goes first."""

    def select_victim(self, running: Sequence[QueuedRequest]) -> int:
        """Return the index of the request to preempt. ``running`` is not empty."""


class Executor(Protocol):
    """Runs steps on one or more devices. Called from one thread."""

    def start(self) -> EngineInfo:
        """Build and load the model, and allocate the KV cache."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Launch a step without waiting for it. Outputs are in the order of launches.

        With deferred sampling (``SchedulerOutput.defer_sampling``), run up to the logits;
        ``sample_tokens`` completes the step before the next launch.
        """

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> None:
        """Complete the newest step, which has deferred sampling."""

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the oldest step in flight and return its output."""

    def check_health(self) -> None:
        """Raise ``EngineDeadError`` if a worker has exited. Cheap; called when idle."""

    def shutdown(self) -> None:
        """Release everything. Called at most once, even if ``start`` has failed."""


class LogitsProcessor(Protocol):
    """Edits logits before sampling, for requests that name it in ``SamplingParams.extra_args``."""

    def validate_params(self, arguments: Any) -> None:
        """Raise ``RequestError`` if ``arguments`` (``extra_args[name]``) are invalid."""

    def apply(
        self, logits: Tensor, arguments: Sequence[Any], tokens: Sequence[Sequence[int]]
    ) -> Tensor:
        """Return edited logits, float32 ``[rows, vocab]``. May work in place.

        ``arguments[r]`` is ``extra_args[name]`` of row ``r``, ``tokens[r]`` are its prompt and
        output ids. Only rows of requests that name this processor are passed.
        """


class StatLogger(Protocol):
    """Receives the engine's statistics once per step."""

    def record(self, stats: EngineStats) -> None: ...
