"""The executor ``processes``: tensor parallelism with one worker process for each device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treadle.api import impl

if TYPE_CHECKING:
    from treadle.api.types import Executor
    from treadle.config import EngineConfig

__all__ = ("treadle_executor",)


@impl
def treadle_executor(name: str, config: EngineConfig, host: Any) -> Executor | None:
    if name != "processes":
        return None
    from treadle_executor_processes.executor import ProcessesExecutor

    return ProcessesExecutor(config, host)
