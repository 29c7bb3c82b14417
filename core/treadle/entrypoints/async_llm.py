"""``AsyncLLM``: the engine in a process of its own, for servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import msgspec

from treadle.api.kinds import RENDERERS
from treadle.api.requests import TokenOutput
from treadle.api.sampling_params import SamplingParams
from treadle.api.stats import EngineStats
from treadle.api.step_types import EngineInfo
from treadle.config import EngineConfig
from treadle.engine.client import EngineClient
from treadle.entrypoints.output_stream import OutputStream
from treadle.errors import EngineDeadError, QueueFullError, RequestError, TreadleError
from treadle.loading.formats import pin_revisions
from treadle.outputs import RequestOutput
from treadle.text.assets import FrontendAssets, open_checkpoint, open_engine
from treadle.text.chat import ChatProcessor, Conversation
from treadle.text.input_processor import InputProcessor
from treadle.text.output_processor import OutputProcessor, PreparedRequest
from treadle.text.parser_plugins import parser_watchdog
from treadle.text.prompts import Prompt, PromptInput, parse_prompt
from treadle.text.text_pool import TextPool

if TYPE_CHECKING:
    from treadle.api.files import Tokenizer

__all__ = ("AsyncLLM",)


class AsyncLLM:
    """Generates text without holding up an event loop::

        async with AsyncLLM(model="org/name") as engine:
            async for output in engine.generate("Hello", SamplingParams(output_kind="delta")):
                print(output.outputs[0].text, end="")

    Scheduler, model and sampler run in a child process; this one never imports torch. It belongs to
    the event loop in which it was started. Wrong requests raise ``RequestError``, a full queue
    ``QueueFullError``, and when the engine dies every pending request raises ``EngineDeadError`` at
    once. A request that fails alone ends with ``finish_reason`` ``error``.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        entry: str = "treadle.engine.process:main",
        **options: Any,
    ) -> None:
        """Check the options. Nothing is read or started; raises ``ConfigError``.

        ``entry`` is what the child process runs, ``module:function``.
        """
        self.config, self.plugins = open_engine(config, model, options)
        limits = self.config.scheduler
        self.texts = TextPool(
            self.plugins.call_stats.budget(RENDERERS, "render"),
            limits.max_num_queued_reqs + limits.max_num_seqs,
        )
        self.parser_watchdog = parser_watchdog(self.plugins.call_stats)
        self._client = EngineClient(self, entry)
        self._starting: asyncio.Task[None] | None = None
        self._processor: InputProcessor | None = None
        self._outputs = OutputProcessor(None)
        self._streams: dict[str, OutputStream] = {}
        self._sequences = 0

    async def start(self) -> AsyncLLM:
        """Load the model; returns this object. The first request does it too.

        Raises what the engine raised: ``CheckpointError``, ``ConfigError``, ``OutOfMemoryError`` …
        """
        if self._starting is None:
            if self._client.fatal_error is not None:
                raise EngineDeadError("the engine was shut down before it was started")
            self._starting = asyncio.create_task(self._start())
        await asyncio.wait((self._starting,))
        if self._starting.cancelled():  # which must not look as if the caller had been cancelled
            raise EngineDeadError("the engine was shut down while it was starting")
        self._starting.result()
        return self

    async def _start(self) -> None:
        config = await asyncio.to_thread(pin_revisions, self.config, self.plugins)
        # The text side is read while the child loads the weights.
        opening = asyncio.create_task(asyncio.to_thread(self._open, config))
        loading = asyncio.create_task(self._client.start(config))
        try:
            assets, info = await asyncio.gather(asyncio.shield(opening), loading)
        except BaseException:
            loading.cancel()
            # Not waited for: a plugin may hang in it.
            opening.add_done_callback(_close)
            await self._client.stop(seconds=0.0)
            raise
        self._outputs = OutputProcessor(assets.guarded_tokenizer, info.eos_token_ids)
        self._processor = InputProcessor(info, assets)

    def _open(self, config: EngineConfig) -> FrontendAssets:
        assets = open_checkpoint(config, self.plugins)
        try:
            assets.start()
        except BaseException:
            assets.close()
            raise
        return assets

    async def shutdown(self) -> None:
        """Abort what runs and end the engine process. May be called twice."""
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        for request_id in list(self._streams):
            self._outputs.abort(request_id)
        await self._client.stop()
        self.texts.close()
        self.parser_watchdog.close()
        if self._processor is not None:
            self.assets.close()

    async def __aenter__(self) -> AsyncLLM:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    @property
    def info(self) -> EngineInfo:
        """Raises ``EngineDeadError`` before ``start``."""
        return self._ready_processor.info

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ``CheckpointError`` if the model has none, ``EngineDeadError`` before ``start``."""
        return self.assets.need_tokenizer()

    @property
    def assets(self) -> FrontendAssets:
        """What was read of the checkpoint for its text. Raises ``EngineDeadError`` before ``start``."""
        return self._ready_processor.assets

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters uses: the checkpoint's ``generation_config.json``."""
        return self.assets.defaults

    @property
    def alive(self) -> bool:
        return self._processor is not None and self._client.fatal_error is None

    @property
    def unfinished(self) -> int:
        """Requests that are not finished."""
        return len(self._streams)

    async def health(self, timeout: float = 60.0) -> None:
        """Raises ``EngineDeadError`` if the engine is dead or does not come back from a step."""
        await self._client.ping(timeout)

    async def stats(self, timeout: float = 60.0) -> EngineStats:
        """The engine's counters. Raises ``EngineDeadError`` like ``health``."""
        return await self._client.ping(timeout)

    async def generate(
        self,
        prompt: PromptInput | Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt; yields its output as it grows, the last one ``finished``.

        Leaving the loop, closing the iterator or cancelling the task aborts the request. A reader
        that is slower than the engine gets several steps in one output. Raises ``RequestError``, for
        a grammar that does not compile before the first output.
        """
        prepared = await self.prepare(
            prompt, sampling_params, request_id=request_id, priority=priority
        )
        async with aclosing(self.submit(prepared)) as stream:
            async for output in stream:
                yield output

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """``generate`` for a conversation, with the arguments of ``LLM.chat``.

        The outputs have ``content``, ``reasoning`` and ``tool_calls``, if a parser matches the
        model. Raises ``RequestError``.
        """
        await self._wait_until_started()
        conversation = Conversation(
            messages=messages, tools=tools, tool_choice=tool_choice, **options
        )
        params = self.assets.defaults if sampling_params is None else sampling_params
        chat = await self._chat_processor.prepare(conversation, params)
        parser = chat.create_parser()
        stream = self.generate(chat.prompt, chat.params, request_id=request_id, priority=priority)
        async with aclosing(stream):
            async for output in stream:
                yield await parser.parse(output)

    async def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Prompt:
        """The prompt of a conversation, text and ids. Raises ``RequestError``.

        ``options`` are the other fields of ``Conversation``, such as ``tools``.
        """
        await self._wait_until_started()
        return await self._chat_processor.render(Conversation(messages=messages, **options))

    async def prepare(
        self,
        prompt: PromptInput | Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int | None = None,
    ) -> PreparedRequest:
        """Encode and check a request without running it. Raises ``RequestError``.

        With ``submit`` this is ``generate`` in two halves, for frontends that must know whether a
        request is good before they begin to answer.
        """
        processor = await self._wait_until_started()
        self._client.check()
        parsed = parse_prompt(prompt)
        if parsed.ids is None:
            processor.check_length(parsed, sampling_params)
            ids = await self.texts.run(
                partial(processor.encode, parsed),
                len(parsed.text or ""),
                client=parsed.client,
                guard=getattr(processor.tokenizer, "guard", None),
                inline=True,
            )
            parsed = msgspec.structs.replace(parsed, ids=ids)
        return processor.prepare(parsed, sampling_params, request_id=request_id, priority=priority)

    def submit(self, request: PreparedRequest) -> OutputStream:
        """Run a prepared request. It is sent to the engine now, not when it is first read, and the
        caller closes the stream.

        Raises ``RequestError`` if its id is in use, ``QueueFullError``, ``EngineDeadError``.
        """
        self._client.check()
        count = len(request.sequences)
        limits = self.config.scheduler
        # The engine would refuse it too; here it costs nothing and bounds what is on the way.
        max_sequences = limits.max_num_queued_reqs + limits.max_num_seqs
        if self._sequences + count > max(max_sequences, count):
            raise QueueFullError(
                f"{self._sequences} sequences are waiting or running; at most {max_sequences} are taken: try "
                "again later"
            )
        if request.id in self._streams:  # finished perhaps, but not read to its end
            raise RequestError(
                f"request_id {request.id!r} belongs to a request whose outputs are still being read; "
                "choose another or leave it out",
                param="request_id",
            )

        def on_close(stream: OutputStream) -> None:
            self._sequences -= count
            del self._streams[request.id]
            self._client.abort(self._outputs.drop(request.id))

        stream = OutputStream(request.id, request.params.output_kind == "delta", on_close)
        self._outputs.add(request, stream.put)
        self._streams[request.id] = stream
        self._sequences += count
        self._client.add(request.sequences)
        return stream

    def abort(self, request_id: str) -> None:
        """End a request: its reader gets a last output with ``finish_reason`` ``abort``.

        An unknown id is not an error: the request may have finished meanwhile.
        """
        self._client.abort(self._outputs.abort(request_id))

    def on_outputs(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            if output.param and (error := self._outputs.refusal(output)) is not None:
                self.on_rejected(output.id, error)
        self._client.abort(self._outputs.process(outputs))

    def on_rejected(self, id: str, error: TreadleError) -> None:
        request_id = self._outputs.request_of(id)
        if request_id is not None:
            self._client.abort(self._outputs.drop(request_id))
            self._streams[request_id].fail(error)

    def on_engine_dead(self, error: EngineDeadError) -> None:
        for request_id, stream in list(self._streams.items()):
            self._outputs.drop(request_id)
            stream.fail(error)

    async def _wait_until_started(self) -> InputProcessor:
        if self._processor is None:
            await self.start()
        return self._ready_processor

    @property
    def _ready_processor(self) -> InputProcessor:
        """Raises ``EngineDeadError`` before ``start``."""
        if self._processor is None:
            raise EngineDeadError("the engine is not started; await start() first")
        return self._processor

    @cached_property
    def _chat_processor(self) -> ChatProcessor:
        return self.assets.chats(
            self.config,
            self.plugins,
            self._ready_processor,
            self.texts,
            watchdog=self.parser_watchdog,
        )


def _close(opened: asyncio.Task[FrontendAssets]) -> None:
    if not opened.cancelled() and opened.exception() is None:
        opened.result().close()
