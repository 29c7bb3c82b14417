"""The executor ``processes``: tensor parallelism with one worker process for each device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.api import impl

if TYPE_CHECKING:
    from weft.api.types import Executor
    from weft.config import EngineConfig

__all__ = ("weft_executor",)


@impl
def weft_executor(name: str, config: EngineConfig, host: Any) -> Executor | None:
    if name != "processes":
        return None
    from weft_executor_processes.executor import ProcessesExecutor

    return ProcessesExecutor(config, host)
