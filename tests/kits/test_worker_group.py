"""An executor without a transport: what it sends, and which replies it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from treadle.api.types import EngineInfo, ModelRunnerOutput
from treadle.config import from_options
from treadle.errors import ConfigError, EngineDeadError, EngineError
from treadle.plugins import PluginManager
from treadle_worker_kit.group import WorkerGroupExecutor
from treadle_worker_kit.messages import (
    Collected,
    Failed,
    Started,
    StartWorker,
    WorkerCommand,
    WorkerReply,
    decode_command,
    decode_reply,
    encode,
)

INFO = EngineInfo(
    model="m", architecture="A", dtype="float32", device="cpu", vocab_size=8, max_model_len=8,
    page_size=4, kv_cache_groups=[], num_async_steps=0, eos_token_ids=[],
)  # fmt: skip
RESULT = ModelRunnerOutput(7, [1])


class Group(WorkerGroupExecutor):
    """Two ranks: everything that is sent to them, and what rank ``answering`` replies."""

    def __init__(self, reply: WorkerReply, answering: int = 0) -> None:
        config = from_options(model="m", device="cpu", tensor_parallel_size=2)
        super().__init__(config, PluginManager(config.plugins))
        self.sent: list[WorkerCommand] = []
        self.reply, self.answering = reply, answering

    def start(self) -> EngineInfo:
        return self.all_started({1: Started(INFO), 0: self.reply})

    def broadcast(self, command: WorkerCommand) -> None:
        self.sent.append(command)

    def receive_result(self) -> tuple[int, WorkerReply]:
        return self.answering, self.reply

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...


def test_rank_0_has_the_facts_and_the_results() -> None:
    group = Group(Started(INFO))
    assert not group.serving
    assert group.start() is INFO and group.serving
    group.reply = Collected(RESULT)
    assert group.get_output() is RESULT


@pytest.mark.parametrize(
    ("reply", "rank", "words"),
    [
        (Started(INFO), 0, "rank 0 answered Started; expected Collected from rank 0"),
        (Collected(RESULT), 1, "rank 1 answered Collected; expected Collected from rank 0"),
    ],
)
def test_an_unexpected_reply_to_a_step_is_an_error(reply: Any, rank: int, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        Group(reply, rank).get_output()


def test_an_unexpected_reply_at_start_is_an_error() -> None:
    group = Group(Collected(RESULT))
    with pytest.raises(EngineError, match="rank 0 answered Collected; expected Started"):
        group.start()
    assert not group.serving


def test_the_first_command_has_all_that_a_worker_needs() -> None:
    group = Group(Started(INFO))
    start = group.start_command(1, "here", local_rank=0, local_world_size=2, device="cuda")
    decoded = decode_command(encode(start))
    assert isinstance(decoded, StartWorker) and decoded == start
    assert (start.rank, start.world_size, start.rendezvous) == (1, 2, "here")
    assert start.config.device.device == "cuda" and group.config.device.device == "cpu"


def test_a_failure_is_the_workers_own_at_start_and_the_engines_end_later() -> None:
    reply = decode_reply(encode(Failed.of(ConfigError("no such thing"))))
    assert isinstance(reply, Failed)
    early, late = reply.error(1, stage="weights"), reply.error(1, stage=None)
    assert isinstance(early, ConfigError) and str(early) == "no such thing"
    assert isinstance(late, EngineDeadError)
    assert str(late) == "rank 1 failed: ConfigError: no such thing"
    strange = Failed.of(ZeroDivisionError("0"))
    assert strange.treadle_error is None
    error = strange.error(0, stage="weights")
    assert isinstance(error, EngineDeadError)
    assert str(error) == "rank 0 failed in stage 'weights' of the start: ZeroDivisionError: 0"
