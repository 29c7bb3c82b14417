"""Workers in actors that Ray places on the nodes of a cluster."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import Any

import ray
from ray.exceptions import RayError

from treadle.api.types import EngineInfo
from treadle.config import EngineConfig
from treadle.errors import ConfigError, EngineDeadError, EngineError, TreadleError
from treadle_executor_ray import RayOptions
from treadle_executor_ray.cluster import Cluster
from treadle_executor_ray.worker import LIFE
from treadle_worker_kit.group import WorkerGroupExecutor
from treadle_worker_kit.messages import (
    Collect,
    Failed,
    Progress,
    Stop,
    WorkerCommand,
    WorkerReply,
    decode_reply,
    encode,
)

__all__ = ("RayExecutor",)

STOP_SECONDS = 5.0
CHECK_SECONDS = 1.0
# How long to look for a dead rank if another one reports that it has lost a peer.
REASON_SECONDS = 2.0


class RayExecutor(WorkerGroupExecutor):
    """An actor for each rank.

    For each rank there is a call of ``wait_until_exit``, which returns if the rank fails and which
    Ray ends if its process dies; the first of them to end ends the whole group.
    """

    def __init__(self, config: EngineConfig, host: Any, options: RayOptions) -> None:
        super().__init__(config, host)
        self._cluster = Cluster(options)
        self._actors: list[Any] = []
        self._exits: list[Any] = []

    def start(self) -> EngineInfo:
        """Place the actors and wait until all of them have loaded their shards."""
        size, device = self.world_size, self.config.device.device
        if device not in ("auto", "cpu", "cuda"):
            raise ConfigError(
                f"device is {device!r}; with executor ray allowed are auto, cpu and cuda: Ray "
                "chooses the devices"
            )
        self._cluster.connect(size, cpu=device == "cpu")
        gpus = self._cluster.gpus()
        use_gpu = device == "cuda" or (device == "auto" and gpus > 0)
        if use_gpu and gpus < size:
            raise ConfigError(
                f"tensor_parallel_size is {size}; the Ray cluster has {gpus} GPUs"
                + ("" if device == "cuda" else " (device='cpu' uses none)")
            )
        try:
            self._actors = self._cluster.place(size, gpu=use_gpu)
            options = {"concurrency_group": LIFE}
            self._exits = [a.wait_until_exit.options(**options).remote() for a in self._actors]
            nodes = [str(ray.get(actor.node.remote())) for actor in self._actors]
            rendezvous = str(ray.get(self._actors[0].rendezvous.remote()))
        except RayError as error:
            raise EngineError(f"Ray could not place the workers: {_error_text(error)}") from error
        return self._begin("cuda" if use_gpu else "cpu", nodes, rendezvous)

    def _begin(self, device: str, nodes: list[str], rendezvous: str) -> EngineInfo:
        """Let every rank build its shard. Return the facts of rank 0."""
        workers_of = Counter(nodes)
        refs = []
        for rank, actor in enumerate(self._actors):
            # Ray shows an actor its own GPU only, so its local rank is 0. All ranks run on the device
            # type that was chosen for the cluster, whatever "auto" would be on their nodes.
            start = self.start_command(
                rank,
                rendezvous,
                local_rank=0,
                local_world_size=workers_of[nodes[rank]],
                device=device,
            )
            refs.append(actor.execute.remote(encode(start)))
        info = self.all_started(self._watch(refs))
        placement = ", ".join(f"{count} on {node[:8]}" for node, count in workers_of.items())
        info.report.append(f"Ray runs {len(nodes)} workers: {placement}.")
        return info

    def _watch(self, refs: list[Any]) -> dict[int, WorkerReply]:
        """Wait until every rank has replied. Raises ``EngineError`` if one is too long in a stage."""
        replies: dict[int, WorkerReply] = {}
        asked: dict[int, Any] = {}
        seen = [0] * len(refs)
        while len(replies) < len(refs):
            missing = [rank for rank in range(len(refs)) if rank not in replies]
            for rank in missing:
                if rank not in asked:
                    call = self._actors[rank].progress.options(concurrency_group=LIFE)
                    asked[rank] = call.remote()
            waiting = [refs[rank] for rank in missing]
            ready, _ = ray.wait([*waiting, *self._exits], num_returns=1, timeout=CHECK_SECONDS)
            for rank in missing:
                if refs[rank] in ready:
                    replies[rank] = self._receive(refs[rank])
                    self.monitor.started(rank)
                elif ready and ready[0] in self._exits:
                    raise self._failure()
                elif ray.wait([asked[rank]], timeout=0)[0]:
                    number, data = self._get(asked.pop(rank))
                    progress = decode_reply(data)
                    if number != seen[rank] and isinstance(progress, Progress):
                        seen[rank] = number
                        self.monitor.update(rank, progress)
            self.monitor.check()
        return replies

    def _get(self, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except RayError:
            raise self._failure() from None

    # -- steps -----------------------------------------------------------------------

    def broadcast(self, command: WorkerCommand) -> None:
        """Send ``command`` to every rank and return at once; failures end ``wait_until_exit``."""
        self._send(command)

    def receive_result(self) -> tuple[int, WorkerReply]:
        """Collect a step from rank 0."""
        return 0, self._receive(self._send(Collect())[0])

    def _send(self, command: WorkerCommand) -> list[Any]:
        data = encode(command)
        try:
            return [actor.execute.remote(data) for actor in self._actors]
        except RayError:
            raise self._failure() from None

    def _receive(self, ref: Any) -> WorkerReply:
        """Wait for a reply, or for the end of any rank."""
        data: Any = None
        # If an actor is gone, so is its reply; its ``wait_until_exit`` has the reason.
        with contextlib.suppress(RayError):
            ready, _ = ray.wait([ref, *self._exits], num_returns=1)
            data = ray.get(ref) if ref in ready else None
        if not data:
            raise self._failure()
        return decode_reply(data)

    # -- ends ------------------------------------------------------------------------

    def check_health(self) -> None:
        """Raise ``EngineDeadError`` if a worker or Ray itself is gone."""
        try:
            exited, _ = ray.wait(self._exits, num_returns=1, timeout=0)
        except RayError as error:
            raise EngineDeadError(f"Ray is gone: {_error_text(error)}") from error
        if exited:
            raise self._failure()

    def _failure(self) -> TreadleError:
        """Return why the group is lost. A dead rank makes the others fail: it is the reason."""
        first: tuple[int, Failed] | None = None
        ranks = {ref: rank for rank, ref in enumerate(self._exits)}
        pending = list(self._exits)
        deadline = time.monotonic() + REASON_SECONDS
        while pending:
            remaining = max(0.0, deadline - time.monotonic())
            ready, pending = ray.wait(pending, num_returns=1, timeout=remaining)
            if not ready:
                break
            rank = ranks[ready[0]]
            try:
                reply = decode_reply(ray.get(ready[0]))
            except RayError as error:
                return EngineDeadError(f"the worker of rank {rank} is gone: {_error_text(error)}")
            if isinstance(reply, Failed):
                if not self.serving and reply.treadle_error is not None:
                    return self.failure(rank, reply)
                first = first or (rank, reply)
        if first is None:
            return EngineDeadError("a worker is gone; Ray does not say which")
        return self.failure(*first)

    def shutdown(self) -> None:
        """Stop the workers and give back what Ray reserved."""
        with contextlib.suppress(RayError):
            alive = self.serving and not ray.wait(self._exits, num_returns=1, timeout=0)[0]
            if alive:
                last = [actor.execute.remote(encode(Stop())) for actor in self._actors]
                ray.wait(last, num_returns=len(last), timeout=STOP_SECONDS)
        self._cluster.close(self._exits)
        self._actors, self._exits = [], []


def _error_text(error: RayError) -> str:
    """Return the message of Ray in one line, without the actor's details that come first."""
    text = " ".join(str(error).split())
    _, separator, reason = text.partition("The actor is dead because ")
    return (reason if separator else text).partition(" Some common causes include")[0]
