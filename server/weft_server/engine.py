"""What the server asks of an engine: the part of ``AsyncLLM`` that it uses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from weft.api.files import ChatRenderer, Tokenizer
    from weft.config import EngineConfig
    from weft.engine.plan import EngineFacts
    from weft.engine.stats import EngineStats
    from weft.outputs import RequestOutput
    from weft.plugins import Host
    from weft.sampling.params import SamplingParams

__all__ = ("Engine", "Prompt")

Prompt = str | list[int] | Mapping[str, Any]


class Engine(Protocol):
    """An engine that has been started."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def facts(self) -> EngineFacts: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def renderer(self) -> ChatRenderer: ...
    @property
    def host(self) -> Host: ...

    def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yield outputs until the request is finished. Closing the iterator aborts the request."""

    def get_default_sampling_params(self) -> SamplingParams: ...

    async def health(self) -> None:
        """Raise ``EngineDeadError`` if the engine has stopped."""

    async def stats(self) -> EngineStats: ...
    async def shutdown(self) -> None: ...
