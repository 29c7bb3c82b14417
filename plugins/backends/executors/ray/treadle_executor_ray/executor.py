"""Sends every step to the actor of each rank, hears from rank 0, watches all of them."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from treadle.api.step_types import EngineFacts, StepEdits, StepPlan, StepResult
from treadle.config import EngineConfig
from treadle.errors import ConfigError, EngineDeadError, EngineError, TreadleError
from treadle.plugins import PluginManager
from treadle.runner.worker_messages import (
    Answer,
    Collect,
    Collected,
    Failed,
    Launch,
    Order,
    Sample,
    Start,
    Started,
    Stop,
    decode_answer,
    encode,
)
from treadle_executor_ray import RayOptions
from treadle_executor_ray.cluster import Cluster
from treadle_executor_ray.worker import LIFE

__all__ = ("RayExecutor",)

STOP_SECONDS = 5.0
# How long to look for the rank that died behind one that says that it has lost another.
REASON_SECONDS = 2.0


class RayExecutor:
    """``tensor_parallel_size`` workers of one model. Used from one thread.

    All ranks compute the same tokens, so a step needs no answer but that of rank 0. Each rank holds
    a lifeline, a call that returns when the rank fails and that Ray ends when its process dies; one
    of them that ends takes the whole group down.
    """

    def __init__(self, config: EngineConfig, host: PluginManager, options: RayOptions) -> None:
        self._config = config
        self._host = host
        self._cluster = Cluster(options)
        self._actors: list[Any] = []
        self._lifelines: list[Any] = []
        self._serving = False

    def start(self) -> EngineFacts:
        size, wanted = self._config.device.tensor_parallel_size, self._config.device.device
        if wanted not in ("auto", "cpu", "cuda"):
            raise ConfigError(
                f"device is {wanted!r}; with executor ray allowed are auto, cpu and cuda: Ray "
                "chooses the devices"
            )
        self._cluster.connect(size, cpu=wanted == "cpu")
        gpus = self._cluster.gpus()
        gpu = wanted == "cuda" or (wanted == "auto" and gpus > 0)
        if gpu and gpus < size:
            raise ConfigError(
                f"tensor_parallel_size is {size}; the Ray cluster has {gpus} GPUs"
                + ("" if wanted == "cuda" else " (device='cpu' uses none)")
            )
        try:
            self._actors = self._cluster.place(size, gpu=gpu)
            options = {"concurrency_group": LIFE}
            self._lifelines = [a.lifeline.options(**options).remote() for a in self._actors]
            nodes = [str(ray.get(actor.node.remote())) for actor in self._actors]
            meeting = str(ray.get(self._actors[0].meeting.remote()))
        except RayError as error:
            raise EngineError(f"Ray could not place the workers: {_said(error)}") from error
        return self._begin("cuda" if gpu else "cpu", nodes, meeting)

    def _begin(self, device: str, nodes: list[str], meeting: str) -> EngineFacts:
        """Let every rank build its shard; the facts of rank 0."""
        # All ranks run on what was found for the cluster, whatever "auto" would be on their nodes.
        chosen = msgspec.structs.replace(self._config.device, device=device)
        config = msgspec.structs.replace(self._config, device=chosen)
        plan, size, here = self._host.selection(), len(nodes), Counter(nodes)
        answers = []
        for rank, actor in enumerate(self._actors):
            # Ray shows an actor its own GPU only, so each one's is the first that it sees.
            start = Start(rank, size, config, plan, meeting, 0, here[nodes[rank]])
            answers.append(actor.obey.remote(encode(start)))
        facts: list[EngineFacts] = []
        for rank, ref in enumerate(answers):
            answer = self._answer(ref)
            if not isinstance(answer, Started):
                raise EngineError(f"rank {rank} answered {type(answer).__name__} at start")
            facts.append(answer.facts)
        self._serving = True
        where = ", ".join(f"{count} on {node[:8]}" for node, count in here.items())
        facts[0].report.append(f"ray          {size} workers: {where}")
        return facts[0]

    # -- steps -----------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> None:
        self._tell(Launch(plan))

    def sample(self, edits: StepEdits | None) -> None:
        self._tell(Sample(edits))

    def collect(self) -> StepResult:
        answer = self._answer(self._tell(Collect())[0])
        if not isinstance(answer, Collected):
            raise EngineError(f"rank 0 answered {type(answer).__name__} to a step")
        return answer.result

    def _tell(self, order: Order) -> list[Any]:
        """Send to every rank and return at once; failures are told by lifelines."""
        data = encode(order)
        try:
            return [actor.obey.remote(data) for actor in self._actors]
        except RayError:
            raise self._reason() from None

    def _answer(self, ref: Any) -> Answer:
        """Wait for an answer, or for the end of any rank."""
        data: Any = None
        # An actor that is gone makes the answer an error; its lifeline says why.
        with contextlib.suppress(RayError):
            ready, _ = ray.wait([ref, *self._lifelines], num_returns=1)
            data = ray.get(ref) if ref in ready else None
        if not data:
            raise self._reason()
        return decode_answer(data)

    # -- ends ------------------------------------------------------------------------

    def check(self) -> None:
        try:
            over, _ = ray.wait(self._lifelines, num_returns=1, timeout=0)
        except RayError as error:
            raise EngineDeadError(f"Ray is gone: {_said(error)}") from error
        if over:
            raise self._reason()

    def _reason(self) -> TreadleError:
        """Why the group is lost. A dead rank makes the others fail: it is the reason, not they."""
        first: tuple[int, Failed] | None = None
        ranks = {ref: rank for rank, ref in enumerate(self._lifelines)}
        waiting = list(self._lifelines)
        deadline = time.monotonic() + REASON_SECONDS
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=left)
            if not ready:
                break
            rank = ranks[ready[0]]
            try:
                failed = decode_answer(ray.get(ready[0]))
            except RayError as error:
                return EngineDeadError(f"the worker of rank {rank} is gone: {_said(error)}")
            if isinstance(failed, Failed):
                if not self._serving and failed.own is not None:
                    return failed.own
                first = first or (rank, failed)
        if first is None:
            return EngineDeadError("a worker is gone; Ray does not say which")
        return first[1].error(first[0], serving=self._serving)

    def stop(self) -> None:
        with contextlib.suppress(RayError):
            alive = self._serving and not ray.wait(self._lifelines, num_returns=1, timeout=0)[0]
            if alive:
                last = [actor.obey.remote(encode(Stop())) for actor in self._actors]
                ray.wait(last, num_returns=len(last), timeout=STOP_SECONDS)
        self._cluster.close(self._lifelines)
        self._actors, self._lifelines = [], []


def _said(error: RayError) -> str:
    """What Ray says, in one line, without the actor's particulars that come first."""
    text = " ".join(str(error).split())
    _, found, reason = text.partition("The actor is dead because ")
    return (reason if found else text).partition(" Some common causes include")[0]
