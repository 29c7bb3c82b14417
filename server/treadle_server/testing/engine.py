"""An engine without a model, for tests of the code around an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from treadle.api.kinds import RENDERERS
from treadle.api.matching import ModelTraits
from treadle.api.sampling_params import SamplingParams
from treadle.api.stats import EngineStats
from treadle.api.step_types import EngineInfo
from treadle.config import EngineConfig, from_options
from treadle.outputs import CompletionOutput, RequestOutput
from treadle.plugins import PluginManager
from treadle.text.assets import FrontendAssets
from treadle.text.parser_plugins import parser_watchdog
from treadle.text.prompts import parse_prompt
from treadle.text.text_pool import TextPool

__all__ = ("CharacterTokenizer", "FakeEngine", "FakeRenderer")

PIECES = ("pieces ", "of ", "eight")


class CharacterStream:
    """Text of one character for each id."""

    def decode_next(self, token: int) -> str:
        return chr(token)

    def flush(self) -> str:
        return ""


class CharacterTokenizer:
    """One id for each character: its code point."""

    vocab_size = 0x110000
    eos_token_id: int | None = 0
    special_token_ids: frozenset[int] = frozenset({0})
    chat_template: str | None = "characters"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))

    def id_to_token(self, token: int) -> str:
        return chr(token)

    def token_bytes(self, token: int) -> bytes:
        return chr(token).encode()

    def create_detokenizer(
        self,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> CharacterStream:
        return CharacterStream()


class FakeRenderer:
    """A renderer: ``role:content|`` for each message. ``messages`` are the arguments of the last call."""

    def __init__(self) -> None:
        self.messages: dict[str, Any] = {}

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        self.messages = {"messages": messages, **options}
        return "".join(f"{m['role']}:{m['content']}|" for m in messages)

    def encode(self, prompt: str) -> list[int]:
        return [ord(c) for c in prompt]


class FakeEngine:
    """A started ``treadle_server.engine.Engine`` that generates the same words for every prompt."""

    resume_event: asyncio.Event | None = None
    """Event to wait for after the first word; ``None`` to continue at once."""

    def __init__(self, plugins: PluginManager, name: str) -> None:
        self.plugins = plugins
        self.texts = TextPool(plugins.call_stats.budget(RENDERERS, "render"), 1000)
        self.config: EngineConfig = from_options(model=name, served_model_name=[name])
        self.parser_watchdog = parser_watchdog(plugins.call_stats)
        self.traits = ModelTraits()
        self.tokenizer, self.renderer = CharacterTokenizer(), FakeRenderer()
        self.output_limit: int | None = None
        self.alive = True
        self.info = EngineInfo(
            model=name,
            architecture="FakeEngine",
            dtype="float32",
            device="cpu",
            vocab_size=self.tokenizer.vocab_size,
            max_model_len=1000,
            page_size=16,
            kv_cache_groups=[],
            num_async_steps=0,
            eos_token_ids=[0],
        )

    @property
    def assets(self) -> FrontendAssets:
        return FrontendAssets(
            self.tokenizer,
            self.renderer,
            output_limit=self.output_limit,
            traits=self.traits,
            guarded_tokenizer=self.tokenizer,
        )

    async def stats(self, timeout: float) -> EngineStats:
        return EngineStats()

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, *, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        parsed = parse_prompt(prompt)
        ids = parsed.ids or self.tokenizer.encode(parsed.text or "")
        text = ""
        for number, piece in enumerate(PIECES):
            if number and self.resume_event is not None:
                await self.resume_event.wait()
            last = number == len(PIECES) - 1
            text = piece if sampling_params.output_kind == "delta" else text + piece
            if not last and sampling_params.output_kind == "final":
                continue
            reason = "stop" if last else None
            outputs = [
                CompletionOutput(
                    index=i, text=text, token_ids=self.tokenizer.encode(text), finish_reason=reason
                )
                for i in range(sampling_params.n)
            ]
            yield RequestOutput(
                request_id=request_id or "x",
                prompt=parsed.text,
                prompt_token_ids=list(ids),
                outputs=outputs,
                finished=last,
            )
