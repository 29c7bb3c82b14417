"""What a chat talks to: an engine in this process, or a server, behind one interface."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from treadle.api.sampling_params import SamplingParams
from treadle.errors import RequestError, TreadleError
from treadle.outputs import OutputPart, ReasoningPart, TextPart, ToolCall

if TYPE_CHECKING:
    from treadle.entrypoints.llm import LLM
    from treadle_cli.chat.settings import Settings
    from treadle_cli.client import Event, Server

__all__ = ("ChatModel", "LocalModel", "RemoteModel", "Update")

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None

POLL_SECONDS = 0.1
"""Longest time until Ctrl-C is noticed while a server does not answer."""


@dataclass(frozen=True, slots=True)
class Update:
    """What is new in an answer, in order. One without parts shows only that time passes.

    ``num_tokens`` counts new tokens; ``total_tokens`` is the count of a server at the end.
    """

    parts: Sequence[OutputPart] = ()
    num_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    total_tokens: int | None = None


class ChatModel(Protocol):
    """Answers conversations."""

    @property
    def name(self) -> str: ...

    @property
    def known_names(self) -> Sequence[str]:
        """The result of the last ``names``, for completion while a line is typed."""

    def names(self) -> Sequence[str]:
        """The models that ``switch`` takes, as far as they can be known."""

    def switch(self, name: str) -> None:
        """Use another model. Raises ``TreadleError`` and keeps the present one if that fails."""

    def defaults(self) -> SamplingParams | None:
        """The parameters that the model recommends; ``None`` if only a server knows them."""

    def stream(self, messages: Messages, settings: Settings, tools: Tools) -> Iterator[Update]:
        """Yield an answer as it is written. Closing the iterator stops it."""

    def close(self) -> None: ...


class LocalModel:
    """An engine in this process."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Load the model. ``options`` are those of ``LLM``, flat."""
        self._options = dict(options)
        self._llm = self._load(self._options)

    @staticmethod
    def _load(options: Mapping[str, Any]) -> LLM:
        from treadle import LLM

        return LLM(**options)

    @property
    def name(self) -> str:
        return self._llm.config.model.model

    @property
    def known_names(self) -> Sequence[str]:
        return self.names()

    def names(self) -> Sequence[str]:
        from treadle_cli.completion import model_names

        return list(model_names())

    def switch(self, name: str) -> None:
        options = {**self._options, "model": name}
        self._llm.shutdown()  # there may be memory for one model only
        try:
            self._llm = self._load(options)
        except TreadleError:
            self._llm = self._load(self._options)
            raise
        self._options = options

    def defaults(self) -> SamplingParams:
        # The recommended length is not used: an answer ends when the model ends it.
        return self._llm.get_default_sampling_params().replace(max_tokens=None)

    def stream(self, messages: Messages, settings: Settings, tools: Tools) -> Iterator[Update]:
        stream: Any = self._llm.stream_chat(messages, settings.params(), tools=tools)
        with closing(stream):
            for output in stream:
                for choice in output.outputs:
                    text = [TextPart(choice.text)] if choice.text else []
                    yield Update(
                        parts=text if choice.parts is None else choice.parts,
                        num_tokens=len(choice.token_ids),
                        finish_reason=choice.finish_reason,
                        error=choice.error,
                    )

    def close(self) -> None:
        self._llm.shutdown()


class RemoteModel:
    """A model of a server."""

    def __init__(self, server: Server, name: str | None) -> None:
        """Raises ``TreadleError`` if the server cannot be reached or has no model ``name``."""
        self._server = server
        self._runner = asyncio.Runner()
        self.known_names: Sequence[str] = ()
        try:
            names = self.names()
            if name is None and not names:
                raise RequestError(f"{server.address} lists no model; name one")
            self.name = names[0] if name is None else name
            self._check(self.name, names)
        except BaseException:
            self.close()
            raise

    def names(self) -> Sequence[str]:
        self.known_names = self._runner.run(self._server.models())
        return self.known_names

    def switch(self, name: str) -> None:
        self._check(name, self.names())
        self.name = name

    def _check(self, name: str, names: Sequence[str]) -> None:
        if names and name not in names:
            raise RequestError(
                f"{self._server.address} has no model {name!r}; it has {', '.join(names)}"
            )

    def defaults(self) -> None:
        return None

    def stream(self, messages: Messages, settings: Settings, tools: Tools) -> Iterator[Update]:
        body: dict[str, Any] = {
            "model": self.name,
            # Reasoning of earlier turns is not sent back: servers refuse it, or ignore it.
            "messages": [
                {k: v for k, v in message.items() if k != "reasoning_content"}
                for message in messages
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
            **msgspec.to_builtins(settings.changes),
        }
        if tools:
            body["tools"] = tools
        events: Any = self._server.stream("/chat/completions", body)
        loop = self._runner.get_loop()
        try:
            while True:
                following = loop.create_task(anext(events, None))
                while not following.done():
                    self._runner.run(wait(following))
                    if not following.done():
                        yield Update()
                timed_event = following.result()
                if timed_event is None:
                    return
                yield update_of(timed_event[1])
        finally:
            if not following.done():
                following.cancel()
                self._runner.run(wait(following))
            self._runner.run(events.aclose())

    def close(self) -> None:
        self._server.close()
        self._runner.close()


async def wait(task: asyncio.Task[Any]) -> None:
    await asyncio.wait((task,), timeout=POLL_SECONDS)


def update_of(event: Event) -> Update:
    """An event of a stream, of which only the first choice was asked for."""
    parts: list[OutputPart] = []
    finish_reason = None
    for choice in event.choices:
        finish_reason = choice.finish_reason
        if (delta := choice.delta) is None:
            continue
        if delta.thought:
            parts.append(ReasoningPart(delta.thought))
        if delta.content:
            parts.append(TextPart(delta.content))
        for call in delta.tool_calls or ():
            function = call.function
            parts.append(
                ToolCall(
                    index=call.index,
                    id=call.id,
                    name=function.name if function else None,
                    arguments=(function.arguments if function else None) or "",
                )
            )
    total = event.usage.completion_tokens if event.usage else None
    return Update(parts, int(bool(parts)), finish_reason, None, total)
