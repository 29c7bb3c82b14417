"""The stages of a start: named before they begin, timed, and left by all ranks together.

Ranks that compile, try a kernel or measure memory need different times for it, and may fail at it. What
then waits for other ranks on a device would wait for one that is still compiling, or gone, and cannot say
so. So ranks meet on the host before they meet in a kernel: at the end of each stage, and wherever a stage
says so. Whoever supervises the ranks is told where each one is.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from treadle.api.communicators import Communicator
from treadle.errors import EngineError
from treadle_layers_kit import SingleRankCommunicator, dry_run
from treadle_triton_kit.compile_ahead import CompileAhead
from treadle_worker_kit.repeated_layers import repeated_layers

__all__ = ("DOWNLOAD", "Announce", "StartStages")

Announce = Callable[[str], None]
"""Receives the stage that this rank is in."""

DOWNLOAD = "download"
"""The stage in which the model's files arrive. It may take hours, as long as it makes progress."""

ALIVE_SECONDS = 5.0
"""Between two announcements of a stage that makes progress."""


class StartStages:
    """The stages of one rank's start, one after the other. Collective: all ranks have the same ones.

    ``seconds`` are those of each stage that has ended, in order.
    """

    def __init__(
        self, tp_group: Communicator | None = None, announce: Announce | None = None
    ) -> None:
        self.seconds: dict[str, float] = {}
        self.compiler = CompileAhead()
        self.model: nn.Module | None = None
        """The model, once it is built."""
        self._tp_group = tp_group or SingleRankCommunicator()
        self._announce = announce or (lambda stage: None)
        self._stage = self._step = ""
        self._began = self._announced = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Enclose a stage. No rank leaves it before all have got to its end."""
        self._stage = name
        self._began = time.perf_counter()
        self.step("")
        yield
        self.meet()
        self.seconds[name] = round(time.perf_counter() - self._began, 3)

    def step(self, step: str) -> None:
        """Name what comes next within the stage; its time limit begins."""
        self._step = f"{self._stage}: {step}" if step else self._stage
        self._tell()

    def alive(self) -> None:
        """Let the time limit begin anew, because the stage makes progress. May be called often."""
        if time.perf_counter() - self._announced > ALIVE_SECONDS:
            self._tell()

    def meet(self) -> None:
        """Wait until all ranks are here, on the host: a rank that is late or gone blocks no device."""
        self._tp_group.all_reduce_min([0])

    def all_agree(self, value: bool) -> bool:
        """Return whether ``value`` is true on all ranks."""
        return bool(self._tp_group.all_reduce_min([int(value)])[0])

    def check_alike(self, what: str, *values: object) -> None:
        """Raise ``EngineError`` on all ranks if ``values`` are not the same on all."""
        digest = zlib.crc32(repr(values).encode())
        least, greatest = self._tp_group.all_reduce_min([digest, -digest])
        if least != -greatest:
            raise EngineError(
                f"the ranks have different {what}; rank {self._tp_group.rank} has {values}: install the "
                "same packages for all of them, on devices of one kind"
            )

    @contextmanager
    def dry_run(self) -> Iterator[bool]:
        """Compile what the ranks are about to run together, then let them meet (see ``dry_run``)."""
        with dry_run(self._tp_group) as compiles:
            yield compiles
        if self._tp_group.world_size > 1:
            self.compiler.wait()
        self.meet()

    @contextmanager
    def ahead(self, *, always: bool = False) -> Iterator[bool]:
        """Compile what follows in threads, by running it in vain (``CompileAhead``).

        Yields whether there is anything to run: not where what came before was found on disk, unless
        ``always``. No rank waits for another. Of the model's layers that are alike, one runs.
        """
        if not (always or self.compiler.compiled):
            yield False
            return
        with (
            dry_run(self._tp_group) as is_alone,
            repeated_layers(self.model),
            self.compiler.collecting() as compiles,
        ):
            yield compiles and (is_alone or self._tp_group.world_size == 1)

    def _tell(self) -> None:
        self._announced = time.perf_counter()
        self._announce(self._step)
