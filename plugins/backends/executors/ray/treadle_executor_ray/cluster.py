"""Ray itself: started or joined, room reserved, actors placed, everything given back."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from treadle.errors import ConfigError, EngineError
from treadle_executor_ray import RayOptions
from treadle_executor_ray.worker import LIFE, WorkerActor

__all__ = ("Cluster",)

log = logging.getLogger("treadle.executor.ray")

# Steps and results are small and travel beside the object store; this is the least that Ray takes.
STORE_BYTES = 80 * 2**20
# Ray's sockets lie deep under its folder, and a path of a socket has at most 107 bytes.
MAX_FOLDER_LEN = 40
STOP_SECONDS = 5.0
CONNECT_SECONDS = 5.0


class Cluster:
    """A connection to Ray and the workers of one engine. ``close`` it, also after a failure."""

    def __init__(self, options: RayOptions) -> None:
        self._options = options
        self._is_owner = False
        self._folder: str | None = None
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []

    def connect(self, size: int, *, cpu: bool) -> None:
        """Start or join Ray. In a process that is connected already, that connection is used.

        Raises ``ConfigError`` if nothing answers at the address.
        """
        address = self._options.address
        if address.startswith("ray://"):
            raise ConfigError(
                f"option address of executors:ray is {address!r}, a Ray client; run treadle on a node "
                "of the cluster with address 'auto'"
            )
        if ray.is_initialized():
            log.info("using the connection to Ray that this process has")
            return
        with _own_signals():
            self._is_owner = True
            if address == "local":
                self._start(size, cpu)
                return
            try:
                _check_reachable(address)
                ray.init(address=address, logging_level=logging.WARNING)
            except (OSError, ValueError, RuntimeError) as error:
                raise ConfigError(
                    f"option address of executors:ray is {address!r}; no Ray cluster answers "
                    f"there: {_line(error)}"
                ) from error

    def _start(self, size: int, cpu: bool) -> None:
        # An engine that starts Ray for itself does not report to Ray's makers in its user's name.
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self._folder = tempfile.mkdtemp(prefix="treadle-")
        try:
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, int(size * self._options.cpus_per_worker) + 1),
                num_gpus=0 if cpu else None,
                object_store_memory=STORE_BYTES,
                include_dashboard=False,
                logging_level=logging.WARNING,
                _temp_dir=self._folder if len(self._folder) <= MAX_FOLDER_LEN else None,
            )
        except Exception as error:
            raise EngineError(f"Ray did not start: {_line(error)}") from error

    def gpus(self) -> int:
        """How many GPUs the whole cluster has, free or not."""
        return int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]

    def place(self, size: int, *, gpu: bool) -> list[Any]:
        """One actor for each rank, each in a bundle of its own.

        Raises ``EngineError`` if the cluster has no room for all of them in time.
        """
        bundle = {"CPU": self._options.cpus_per_worker} if self._options.cpus_per_worker else {}
        if gpu:
            bundle["GPU"] = 1
        if not bundle:
            bundle = {"CPU": 0.001}  # a bundle reserves something, or Ray refuses it
        self._group = placement_group([bundle] * size, strategy=self._options.placement)
        if not self._group.wait(self._options.placement_timeout):
            available = ray.available_resources()  # type: ignore[no-untyped-call]
            free = {resource: available.get(resource, 0.0) for resource in ("CPU", "GPU")}
            raise EngineError(
                f"Ray has no room for {size} workers of {bundle} ({self._options.placement}) after "
                f"{self._options.placement_timeout} s; free are {free}"
            )
        actor: Any = ray.remote(concurrency_groups={LIFE: 2})(WorkerActor)  # type: ignore[call-overload]
        for rank in range(size):
            options = actor.options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, rank),
            )
            self._actors.append(options.remote())
        return self._actors

    def close(self, exit_refs: list[Any]) -> None:
        """Kill the actors, wait until they are gone, leave Ray; stop it if we started it."""
        if ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError):
                for actor in self._actors:
                    ray.kill(actor)
                if exit_refs:
                    ray.wait(exit_refs, num_returns=len(exit_refs), timeout=STOP_SECONDS)
                if self._group is not None:
                    remove_placement_group(self._group)
            if self._is_owner:
                with _own_signals():
                    ray.shutdown()
        self._actors, self._group = [], None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Undo what Ray does to the signals: the process that runs an engine decides when to end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_reachable(address: str) -> None:
    """Raise ``OSError`` if nobody listens there: Ray itself would try for minutes."""
    host, separator, port = address.rpartition(":")
    if separator and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
