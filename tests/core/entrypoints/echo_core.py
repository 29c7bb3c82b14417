"""A core without a model for tests of the process around it: it answers with the prompt.

The first id of a prompt may be a command; ``served_model_name`` says how starting goes wrong.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from typing import Any

from treadle.api.requests import EngineRequest, TokenOutput
from treadle.api.stats import EngineStats
from treadle.api.step_types import EngineInfo
from treadle.config import EngineConfig
from treadle.engine.process import main as engine_main
from treadle.errors import CheckpointError, QueueFullError
from treadle.text.request_checks import check_request

RAISE, EXIT, KILL, HANG, FULL, BREAK, SLOW = 201, 202, 203, 204, 205, 206, 207
INFO = EngineInfo(
    model="echo", architecture="Echo", dtype="float32", device="none", vocab_size=320,
    max_model_len=4096, page_size=16, kv_cache_groups=[], num_async_steps=0, eos_token_ids=[257],
)  # fmt: skip


class EchoCore:
    def __init__(self, config: EngineConfig) -> None:
        match config.model.served_model_name:
            case ["missing"]:
                raise CheckpointError("no weights in /nowhere")
            case ["broken"]:
                raise ZeroDivisionError("a bug")
            case ["exit"]:
                os._exit(7)
            case ["slow"]:
                time.sleep(60)
        self.info = INFO
        self.running: dict[str, tuple[EngineRequest, int]] = {}
        self.steps = self.generated = 0

    def add_request(self, request: EngineRequest, *, is_checked: bool = False) -> None:
        check_request(request, self.info)
        if request.prompt_ids[0] == FULL:
            raise QueueFullError("the queue is full")
        if request.prompt_ids[0] == BREAK:
            raise KeyError("secret detail")
        self.running[request.id] = (request, 0)

    def abort_requests(self, ids: Iterable[str]) -> None:
        for sequence in ids:
            self.running.pop(sequence, None)

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def step(self) -> list[TokenOutput]:
        self.steps += 1
        outputs = []
        for request, num_outputs in list(self.running.values()):
            self._obey(request.prompt_ids[0], num_outputs)
            token = request.prompt_ids[num_outputs % len(request.prompt_ids)]
            ends = num_outputs + 1 == (request.params.max_tokens or 10**9)
            outputs.append(TokenOutput(request.id, [token], "length" if ends else None))
            self.generated += 1
            if ends:
                del self.running[request.id]
            else:
                self.running[request.id] = (request, num_outputs + 1)
        return outputs

    def _obey(self, command: int, num_outputs: int) -> None:
        if command == SLOW:
            time.sleep(0.01)
        if num_outputs < 2:
            return
        if command == RAISE:
            raise RuntimeError("a kernel failed")
        if command == EXIT:
            os._exit(3)
        if command == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if command == HANG:
            time.sleep(60)

    def check_health(self) -> None:
        pass

    def close(self) -> None:
        pass

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_steps=self.steps, num_running=len(self.running), generation_tokens=self.generated
        )


def main(fd: int) -> None:
    make: Any = EchoCore
    engine_main(fd, make)
