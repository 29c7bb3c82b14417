"""The executor ``uni``: one device, in the engine's process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treadle.api import impl
from treadle_worker_kit.garbage import without_collections

if TYPE_CHECKING:
    from treadle.api.types import Executor
    from treadle.config import EngineConfig

__all__ = ("treadle_executor",)


@impl
def treadle_executor(name: str, config: EngineConfig, plugins: Any) -> Executor | None:
    if name != "uni":
        return None
    with without_collections():
        from treadle_executor_uni.executor import UniProcExecutor

    return UniProcExecutor(config, plugins)
