"""What every handler needs, made once for a server: the engine, its names, limits and counters."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from treadle.api.kinds import REASONING, TOOL_PARSERS
from treadle.api.parsers import Tool
from treadle.api.sampling_params import SamplingParams
from treadle.api.stats import EngineStats
from treadle.errors import (
    CheckpointError,
    EngineDeadError,
    EngineError,
    ModelNotFoundError,
    PluginLoadError,
    RequestError,
    TreadleError,
)
from treadle_server.config import ServerConfig
from treadle_server.engine import Engine
from treadle_server.errors import APIError, plugin_failed
from treadle_server.fingerprint import fingerprint
from treadle_server.flights import Flights
from treadle_server.markers import Marks, Sieve
from treadle_server.matching import with_parsers
from treadle_server.metrics import Metrics
from treadle_server.parsing import Guard, Splitter, WatchedSplitter
from treadle_server.watch import Watch

if TYPE_CHECKING:
    from treadle.plugins import PluginManager
    from treadle_server.served import Served

__all__ = ("Context",)

T = TypeVar("T")
log = logging.getLogger("treadle.server")
TEXTS = 2
"""Threads for what renderers do, which may take long for long conversations."""
BIG = 4096
"""Characters or ids from which text work leaves the event loop for a thread."""


class Context:
    """One server around one started engine.

    ``draining`` is set when it is going to stop, ``dead`` when the engine has stopped, ``hangs``
    while the engine does not answer; ``stats`` is what it said last. ``config`` names the parsers
    that are used, ``None`` for none, where the user said ``auto``.
    """

    served: Served
    """The application that answers, set by ``create_app``."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = with_parsers(config, engine.host, engine.traits)
        self.names = list(engine.config.model.served_model_name) or [engine.config.model.model]
        self.model = self.names[0]
        self.started = int(time.time())
        self.defaults: SamplingParams = engine.get_default_sampling_params()
        self.flights = Flights(config.request_timeout)
        self.metrics = Metrics(self.model, engine.host.call_stats)
        self.draining = False
        self.dead: EngineDeadError | None = None
        self.hangs: EngineDeadError | None = None
        self.stats: EngineStats | None = None
        self.marks = Marks(self)
        self.fingerprint = system_fingerprint(engine)
        self.knows_developer = knows_developer(engine)
        self.reloading = asyncio.Lock()
        kinds = ("tool_parsers", "reasoning")
        self.watch = Watch(max(engine.host.call_stats.budget(f"{kind}:", "feed") for kind in kinds))
        texts = engine.host.call_stats.budget("renderers:", "render")
        self._texts = [Watch(texts) for _ in range(TEXTS)]
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="treadle-text")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for watch in (self.watch, *self._texts):
            watch.close()

    def exchange(self, host: PluginManager, served: Served | None) -> None:
        """Use other plugins from now on, and another application if there is one."""
        self.engine.host = host
        self.marks = Marks(self)
        self.fingerprint = system_fingerprint(self.engine)
        self.watch.forget()
        if served is not None:
            self.served, old = served, self.served
            old.retire()

    def check_alive(self) -> None:
        """Raise ``EngineDeadError`` or ``APIError`` unless the engine is well. Asks nobody."""
        if self.dead is not None:
            raise self.dead
        if not self.engine.alive:
            raise EngineDeadError("the engine has stopped")
        if self.hangs is not None:
            raise APIError(
                503,
                f"the engine has not answered for {self.config.hang_timeout:g} s",
                code="engine_hangs",
            )

    def check_model(self, name: str | None) -> None:
        """Raise unless ``name`` is served; no name is the first one."""
        if name is None or name == "" or name in self.names:
            return
        if len(name) > 256:
            raise RequestError("model has more than 256 characters", param="model")
        served = ", ".join(self.names)
        raise ModelNotFoundError(
            f"the model {name!r} does not exist here; this server has: {served}", param="model"
        )

    def granted(self, params: SamplingParams) -> SamplingParams:
        """``params`` with no more output tokens than the checkpoint's ``max_new_tokens``.

        ``ignore_eos`` lifts the limit: who measures says how long an output is.
        """
        limit, asked = self.engine.output_limit, params.max_tokens
        if limit is None or asked is None or asked <= limit or params.ignore_eos:
            return params
        return params.replace(max_tokens=max(limit, params.min_tokens))

    def new_id(self, prefix: str) -> str:
        """An id that nobody can guess or repeat, whatever the client calls its request."""
        return f"{prefix}-{secrets.token_hex(16)}"

    async def off_loop(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """Call ``work``, in a thread if its input is big: the event loop must not stand still."""
        if size < BIG:
            return work(*arguments)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(work, *arguments))

    async def rendered(self, work: Callable[[], T]) -> T:
        """What the renderer, a plugin, makes in a thread that can be given up. Raises ``APIError``
        if it does not come back."""
        began = time.perf_counter()
        try:
            return await min(self._texts, key=lambda watch: watch.waiting).run(work)
        except TimeoutError as error:
            plugin = getattr(self.engine.renderer, "plugin", "renderers:unknown")
            log.error("%s does not come back: %s", plugin, error)
            self.engine.host.call_stats.failed(plugin, "render", began)
            raise plugin_failed(plugin) from error

    async def asked(self, kind: str, name: str, method: str, work: Callable[[], T]) -> T:
        """What a parser says outside of an answer: counted, and in a thread that can be given up.

        Raises ``PluginLoadError``, in strict mode ``EngineError``, whatever the plugin raises; but
        a ``RequestError`` is the client's.
        """
        host, began = self.engine.host, time.perf_counter()
        guard = host.guard(host.kind(kind), name)

        def call() -> T:
            with guard.call_context(method):
                return work()

        try:
            return await self.watch.run(call)
        except RequestError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError):
                host.call_stats.failed(f"{kind}:{name}", method, began)
            text = (
                str(error)
                if isinstance(error, TreadleError)
                else guard.entry.failure(method, error)
            )
            if host.switches.strict:
                raise EngineError(f"{text} (plugin_strict makes it fatal)") from error
            raise PluginLoadError(text) from error

    def splitter(
        self,
        prompt: str,
        tools: Sequence[Tool],
        *,
        host: PluginManager,
        reasoning: bool,
        parallel: bool,
        hidden: Collection[int] = (),
    ) -> WatchedSplitter | None:
        """The parsers of one output, from ``host``; ``None`` if no parser applies. The text of the
        special tokens ``hidden`` is taken out."""
        tokenizer, report = (
            self.engine.tokenizer,
            self.metrics.parser_failed,
        )
        thinking, calls, strict = None, None, host.switches.strict
        if reasoning and (name := self.config.reasoning_parser) is not None:
            build = partial(host.create, REASONING, name, tokenizer=tokenizer, prompt=prompt)
            thinking = Guard(
                f"reasoning_parser={name}", build, report, host.call_stats, strict=strict
            )
        if tools and (name := self.config.tool_parser) is not None:
            build_tools = partial(host.create, TOOL_PARSERS, name, tokenizer=tokenizer, tools=tools)
            calls = Guard(
                f"tool_parser={name}", build_tools, report, host.call_stats, strict=strict
            )
        if thinking is None and calls is None:
            return None
        sieve = Sieve(tokenizer, hidden) if hidden else None
        splitter = Splitter(thinking, calls, None if parallel else 1, sieve)
        return WatchedSplitter(splitter, self.watch)


def system_fingerprint(engine: Engine) -> str:
    """Of the model, how it is run, and the plugins. The names that clients use do not count."""
    config = engine.config
    model = msgspec.structs.replace(config.model, served_model_name=[])
    about = (model, config.cache, config.device, config.plugins, engine.traits.config)
    return fingerprint(engine.host, *about)


def knows_developer(engine: Engine) -> bool:
    """Whether the chat template tells the role ``developer`` from ``system``."""
    try:
        return "developer" in (engine.tokenizer.chat_template or "")
    except CheckpointError:
        return False
