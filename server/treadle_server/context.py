"""What every handler needs, made once for a server: the engine, its names, limits and counters."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from treadle.api.sampling_params import SamplingParams
from treadle.api.stats import EngineStats
from treadle.errors import CheckpointError, EngineDeadError, ModelNotFoundError, RequestError
from treadle.text.chat import ChatProcessor
from treadle.text.input_processor import InputProcessor
from treadle.text.parser_plugins import ParserPlugins, PluginWatchdogs
from treadle_server.active_requests import ActiveRequests
from treadle_server.config import ServerConfig
from treadle_server.engine import Engine
from treadle_server.errors import APIError
from treadle_server.fingerprint import fingerprint
from treadle_server.metrics import Metrics
from treadle_server.sampling import to_params
from treadle_server.wire.common import SamplingFields

if TYPE_CHECKING:
    from treadle.plugins import PluginManager
    from treadle_server.served import AppInstance

__all__ = ("LARGE", "ServerContext")

T = TypeVar("T")
LARGE = 4096
"""Characters or ids from which text work leaves the event loop for a thread."""


class ServerContext:
    """One server around one started engine.

    ``draining`` is set when it is going to stop, ``is_dead`` when the engine has stopped, ``is_hung``
    while the engine does not answer; ``stats`` is what it returned last. ``chat_processor`` prepares chats
    with the parsers that are used.
    """

    served: AppInstance
    """The application that answers, set by ``create_app``."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.names = list(engine.config.model.served_model_name) or [engine.config.model.model]
        self.model = self.names[0]
        self.started = int(time.time())
        self.defaults: SamplingParams = engine.get_default_sampling_params()
        self.active_requests = ActiveRequests(config.request_timeout)
        self.metrics = Metrics(self.model, engine.plugins.call_stats)
        self.draining = False
        self.is_dead: EngineDeadError | None = None
        self.is_hung: EngineDeadError | None = None
        self.stats: EngineStats | None = None
        self.watchdogs = PluginWatchdogs(engine.plugins.call_stats)
        self.chat_processor = self._chat_processor()
        self.fingerprint = system_fingerprint(engine)
        self.knows_developer = knows_developer(engine)
        self.reloading = asyncio.Lock()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="treadle-text")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.watchdogs.close()

    def exchange(self, plugins: PluginManager, served: AppInstance | None) -> None:
        """Use other plugins from now on, and another application if there is one."""
        self.engine.plugins = plugins
        self.chat_processor = ChatProcessor(
            self.chat_processor.processor, self.chat_processor.parser_plugins.with_host(plugins)
        )
        self.fingerprint = system_fingerprint(self.engine)
        self.watchdogs.parsers.discard_stuck()
        if served is not None:
            self.served, old = served, self.served
            old.retire()

    def check_alive(self) -> None:
        """Raise ``EngineDeadError`` or ``APIError`` unless the engine is well. Asks nobody."""
        if self.is_dead is not None:
            raise self.is_dead
        if not self.engine.alive:
            raise EngineDeadError("the engine has stopped")
        if self.is_hung is not None:
            raise APIError(
                503,
                f"the engine has not answered for {self.config.hang_timeout:g} s",
                code="engine_unresponsive",
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

    def to_params(self, request: SamplingFields, **changes: Any) -> SamplingParams:
        """Return the sampling parameters of a request, with no more output tokens than the
        checkpoint's ``max_new_tokens``, unless it sets ``ignore_eos``. Raises ``RequestError``."""
        params = to_params(request, self.defaults, self.engine.info.max_model_len, **changes)
        limit, requested = self.engine.output_limit, params.max_tokens
        if limit is None or requested is None or requested <= limit or params.ignore_eos:
            return params
        return params.replace(max_tokens=max(limit, params.min_tokens))

    def new_id(self, prefix: str) -> str:
        """An id that nobody can guess or repeat, whatever the client calls its request."""
        return f"{prefix}-{secrets.token_hex(16)}"

    async def run_in_thread_if_large(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """Call ``work``, in a thread if its input is large: the event loop must not wait for it."""
        if size < LARGE:
            return work(*arguments)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(work, *arguments))

    def _chat_processor(self) -> ChatProcessor:
        """Raises ``PluginConflictError`` if several parsers match the model equally well."""
        engine = self.engine
        try:
            tokenizer = engine.tokenizer
        except CheckpointError:
            tokenizer = None
        plugins = ParserPlugins.choose(
            engine.plugins,
            tokenizer,
            engine.traits,
            engine.config.model,
            watchdogs=self.watchdogs,
            on_failure=self.metrics.parser_failed,
        )
        return ChatProcessor(InputProcessor(engine.info, tokenizer, engine.renderer), plugins)


def system_fingerprint(engine: Engine) -> str:
    """Of the model, how it is run, and the plugins. The names that clients use do not count."""
    config = engine.config
    model = msgspec.structs.replace(config.model, served_model_name=[])
    about = (model, config.cache, config.device, config.plugins, engine.traits.config)
    return fingerprint(engine.plugins, *about)


def knows_developer(engine: Engine) -> bool:
    """Whether the chat template tells the role ``developer`` from ``system``."""
    try:
        return "developer" in (engine.tokenizer.chat_template or "")
    except CheckpointError:
        return False
