"""The hook behind ``weft.executors: inline``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.api import impl

if TYPE_CHECKING:
    from weft.api.engine import Executor
    from weft.config import EngineConfig

__all__ = ("weft_executor",)


@impl
def weft_executor(name: str, config: EngineConfig, host: Any) -> Executor | None:
    if name != "inline":
        return None
    from weft.runner.inline import InlineExecutor

    return InlineExecutor(config, host)
