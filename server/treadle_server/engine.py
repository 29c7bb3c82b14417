"""What the server asks of an engine: the part of ``AsyncLLM`` that it uses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from treadle.api.files import ChatRenderer, Tokenizer
    from treadle.api.matching import ModelTraits
    from treadle.api.sampling_params import SamplingParams
    from treadle.api.stats import EngineStats
    from treadle.api.step_types import EngineInfo
    from treadle.config import EngineConfig
    from treadle.outputs import RequestOutput
    from treadle.plugins import PluginManager

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
    def traits(self) -> ModelTraits:
        """What the checkpoint says of itself, for plugins that are made for some models."""

    @property
    def renderer(self) -> ChatRenderer | None: ...
    @property
    def output_limit(self) -> int | None:
        """The most output tokens that the checkpoint wants granted to a request."""

    @property
    def alive(self) -> bool:
        """Whether the engine runs, as far as is known without asking it."""

    plugins: PluginManager
    """Another one takes its place when a plugin is reloaded."""

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, *, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs until the request is finished. Closing the iterator aborts the request."""

    def get_default_sampling_params(self) -> SamplingParams: ...

    async def stats(self, timeout: float) -> EngineStats:
        """Ask between two steps. Raises ``EngineDeadError`` if the engine has stopped, or does not
        come back from a step within ``timeout`` seconds."""
