"""``LLMEngine``: requests are added one by one, and steps are taken by the caller."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import treadle
from treadle.errors import RequestError

from .engine_args import EngineArgs
from .llm import refuse, treadle_params
from .outputs import RequestOutput, from_treadle
from .sampling_params import SamplingParams

__all__ = ("LLMEngine",)


class LLMEngine:
    """An engine that works when ``step`` is called."""

    def __init__(self, **options: Any) -> None:
        self.engine = treadle.LLM(**{k: v for k, v in options.items() if v is not None})
        self._streams: dict[str, Iterator[treadle.RequestOutput]] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> LLMEngine:
        return cls(**engine_args.options)

    def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams, **others: Any
    ) -> None:
        """Queue a request. Raises ``RequestError`` if it is wrong or its id is in use."""
        refuse("LLMEngine.add_request", {k: v for k, v in others.items() if k != "arrival_time"})
        if request_id in self._streams:
            raise RequestError(f"request_id {request_id!r} is in use", param="request_id")
        self._streams[request_id] = self.engine.stream(prompt, treadle_params(params))

    def step(self) -> list[RequestOutput]:
        """Work until each request has an output, and return them."""
        outputs = []
        for request_id, stream in list(self._streams.items()):
            output = next(stream, None)
            if output is not None:
                outputs.append(from_treadle(output, request_id))
            if output is None or output.finished:
                del self._streams[request_id]
        return outputs

    def abort_request(self, request_id: str | list[str]) -> None:
        """End requests; unknown ids are ignored."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if (stream := self._streams.pop(name, None)) is not None:
                stream.close()  # type: ignore[attr-defined]

    def has_unfinished_requests(self) -> bool:
        return bool(self._streams)

    def get_num_unfinished_requests(self) -> int:
        return len(self._streams)
