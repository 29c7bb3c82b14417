"""The interface of an engine that the server needs: a part of ``AsyncLLM``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from treadle.api.files import Tokenizer
    from treadle.api.sampling_params import SamplingParams
    from treadle.api.stats import EngineStats
    from treadle.api.step_types import EngineInfo
    from treadle.config import EngineConfig
    from treadle.outputs import RequestOutput
    from treadle.plugins import PluginManager
    from treadle.processes.watchdog import PluginThreads
    from treadle.text.assets import FrontendAssets
    from treadle.text.text_pool import TextPool

__all__ = ("Engine", "Prompt")

Prompt = str | list[int] | Mapping[str, Any]


class Engine(Protocol):
    """An engine that has been started."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def info(self) -> EngineInfo: ...
    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ``CheckpointError`` if the model has none."""

    @property
    def assets(self) -> FrontendAssets:
        """What was read of the checkpoint for its text."""

    @property
    def alive(self) -> bool:
        """Whether the engine runs, as far as is known without calling it."""

    plugins: PluginManager
    """Another one takes its place when a plugin is reloaded."""

    texts: TextPool
    """Where chats are rendered and texts encoded."""

    parser_watchdog: PluginThreads
    """What calls the parsers that do not run on the event loop."""

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, *, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs until the request is finished. Closing the iterator aborts the request."""

    async def stats(self, timeout: float) -> EngineStats:
        """Return the engine's stats, taken between two steps.

        Raises ``EngineDeadError`` if the engine has stopped or does not answer within ``timeout``
        seconds.
        """
