"""The plugin of the executor ``inline``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treadle.api import impl

if TYPE_CHECKING:
    from treadle.api.engine import Executor
    from treadle.config import EngineConfig

__all__ = ("treadle_executor",)


@impl
def treadle_executor(name: str, config: EngineConfig, host: Any) -> Executor | None:
    if name != "inline":
        return None
    from treadle.runner.inline import InlineExecutor

    return InlineExecutor(config, host)
