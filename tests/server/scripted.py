"""An engine that does what a test tells it: for faults that a real one does not have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec

from treadle.api.kinds import RENDERERS
from treadle.api.matching import ModelTraits
from treadle.api.sampling_params import SamplingParams
from treadle.api.stats import EngineStats
from treadle.api.step_types import EngineInfo
from treadle.config import EngineConfig, from_options
from treadle.errors import EngineDeadError, RequestError
from treadle.outputs import CompletionOutput, Logprob, RequestOutput
from treadle.plugins import PluginManager
from treadle.text.assets import FrontendAssets
from treadle.text.parser_plugins import parser_watchdog
from treadle.text.prompts import parse_prompt
from treadle.text.text_pool import TextPool
from treadle_server.testing.engine import CharacterTokenizer, FakeRenderer

Before = Callable[["ScriptedEngine", int], None]


class ScriptedEngine:
    """Answers every prompt with ``text``, one piece for each step.

    ``before(engine, step)`` runs before a step and may raise. ``pause`` is the length of a step.
    ``running`` counts requests whose generator is open; ``aborted`` those closed too early.
    """

    def __init__(
        self,
        text: Sequence[str] = ("Hel", "lo", " wor", "ld"),
        *,
        pause: float = 0.0,
        before: Before | None = None,
        plugins: PluginManager | None = None,
        reason: str = "stop",
        names: Sequence[str] = (),
        max_model_len: int = 1000,
        traits: ModelTraits | None = None,
        output_limit: int | None = None,
    ) -> None:
        self.config: EngineConfig = from_options(
            model="scripted", served_model_name=list(names) or ["scripted"]
        )
        self.text, self.pause, self.before, self.reason = list(text), pause, before, reason
        self.plugins = plugins or PluginManager()
        self.texts = TextPool(self.plugins.call_stats.budget(RENDERERS, "render"), 1000)
        self.parser_watchdog = parser_watchdog(self.plugins.call_stats)
        self.traits = traits or ModelTraits()
        self.output_limit = output_limit
        self.tokenizer, self.renderer = CharacterTokenizer(), FakeRenderer()
        self.info = EngineInfo(
            model="scripted",
            architecture="Scripted",
            dtype="float32",
            device="cpu",
            vocab_size=1000,
            max_model_len=max_model_len,
            page_size=16,
            kv_cache_groups=[],
            num_async_steps=0,
            eos_token_ids=[0],
        )
        self.dead: EngineDeadError | None = None
        self.running = self.aborted = self.finished = 0
        self.ids: list[str | None] = []
        self.params: SamplingParams | None = None
        self.hold: Callable[[int], Awaitable[None]] | None = None
        self.healthy = asyncio.Event()
        self.healthy.set()

    def use_parsers(self, **parsers: str) -> None:
        """Start with these parsers: ``tool_call_parser`` and ``reasoning_parser``."""
        model = msgspec.structs.replace(self.config.model, **parsers)
        self.config = msgspec.structs.replace(self.config, model=model)

    @property
    def assets(self) -> FrontendAssets:
        return FrontendAssets(
            self.tokenizer,
            self.renderer,
            output_limit=self.output_limit,
            traits=self.traits,
            guarded_tokenizer=self.tokenizer,
        )

    async def start(self) -> None: ...

    async def shutdown(self) -> None: ...

    @property
    def alive(self) -> bool:
        return self.dead is None

    async def stats(self, timeout: float) -> EngineStats:
        try:
            async with asyncio.timeout(timeout):
                await self.healthy.wait()
        except TimeoutError:
            raise EngineDeadError("it hangs") from None
        if self.dead is not None:
            raise self.dead
        return EngineStats(
            num_running=self.running,
            num_pages=10,
            num_used_pages=self.running,
            finished={"stop": self.finished, "abort": self.aborted},
        )

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, *, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        params = sampling_params
        parsed = parse_prompt(prompt)
        ids = list(parsed.ids or self.tokenizer.encode(parsed.text or ""))
        if any(not 0 <= i < self.tokenizer.vocab_size for i in ids):
            raise RequestError(f"prompt holds {max(ids)}, which is not a token id", param="prompt")
        self.params = params
        self.ids.append(request_id)
        self.running += 1
        is_complete = False
        try:
            async for output in self._steps(ids, parsed.text, params):
                yield output
            is_complete = True
        finally:
            self.running -= 1
            self.finished += is_complete
            self.aborted += not is_complete

    async def _steps(
        self, ids: list[int], text: str | None, params: SamplingParams
    ) -> AsyncIterator[RequestOutput]:
        pieces = self.text[: params.max_tokens]
        total = [CompletionOutput(index=i, text="", token_ids=[]) for i in range(params.n)]
        for step, piece in enumerate(pieces):
            if self.before is not None:
                self.before(self, step)
            if self.hold is not None:
                await self.hold(step)
            await asyncio.sleep(self.pause)
            if self.dead is not None:
                raise self.dead
            last = step == len(pieces) - 1
            cut = last and len(pieces) < len(self.text)
            reason = ("length" if cut else self.reason) if last else None
            outputs = [self._one(i, piece, reason, params) for i in range(params.n)]
            if params.output_kind == "delta":
                yield self._output(ids, text, params, outputs, last)
                continue
            for accumulated, new in zip(total, outputs, strict=True):
                accumulated.text += new.text
                accumulated.token_ids += new.token_ids
                accumulated.finish_reason = new.finish_reason
                accumulated.logprobs = (
                    (accumulated.logprobs or []) + new.logprobs if new.logprobs else None
                )
        if params.output_kind != "delta":
            yield self._output(ids, text, params, total, True)

    def _one(
        self, index: int, piece: str, reason: str | None, params: SamplingParams
    ) -> CompletionOutput:
        ids = [ord(c) for c in piece]
        return CompletionOutput(
            index=index,
            text=piece,
            token_ids=ids,
            finish_reason=reason,
            logprobs=None if params.logprobs is None else [self._position(i) for i in ids],
        )

    def _output(
        self,
        ids: list[int],
        text: str | None,
        params: SamplingParams,
        outputs: list[CompletionOutput],
        finished: bool,
    ) -> RequestOutput:
        positions = None
        if params.prompt_logprobs is not None:
            positions = [None, *(self._position(i) for i in ids[1:])]
        return RequestOutput(
            request_id="x",
            prompt=text,
            prompt_token_ids=ids,
            outputs=outputs,
            finished=finished,
            num_cached_tokens=2,
            prompt_logprobs=positions,
        )

    @staticmethod
    def _position(token: int) -> dict[int, Logprob]:
        return {
            token: Logprob(logprob=-0.5, rank=1, decoded_token=chr(token)),
            token + 1: Logprob(logprob=float("-inf"), rank=2, decoded_token=chr(token + 1)),
        }
