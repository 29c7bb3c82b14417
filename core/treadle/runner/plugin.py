"""The plugin of the executor ``uni``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treadle.api import impl

if TYPE_CHECKING:
    from treadle.api.engine import Executor
    from treadle.config import EngineConfig

__all__ = ("treadle_executor",)


@impl
def treadle_executor(name: str, config: EngineConfig, plugins: Any) -> Executor | None:
    if name != "uni":
        return None
    from treadle.runner.uniproc_executor import UniProcExecutor

    return UniProcExecutor(config, plugins)
