"""The executor ``mp``: tensor parallelism with one worker process for each device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treadle.api import impl

if TYPE_CHECKING:
    from treadle.api.types import Executor
    from treadle.config import EngineConfig

__all__ = ("treadle_executor",)


@impl
def treadle_executor(name: str, config: EngineConfig, plugins: Any) -> Executor | None:
    if name != "mp":
        return None
    from treadle_executor_mp.executor import MultiprocExecutor

    return MultiprocExecutor(config, plugins)
