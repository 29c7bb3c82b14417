"""What every handler needs, made once for a server: the engine, its names, limits and counters."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
from litestar import Request

from treadle.api.sampling_params import SamplingParams
from treadle.api.stats import EngineStats
from treadle.errors import CheckpointError, EngineDeadError, ModelNotFoundError, RequestError
from treadle.testing.examination.integrity import codes
from treadle.text.chat import ChatProcessor
from treadle.text.input_processor import InputProcessor
from treadle.text.parser_plugins import ParserPlugins
from treadle_server.active_requests import ActiveRequests
from treadle_server.config import ServerConfig
from treadle_server.engine import Engine
from treadle_server.errors import APIError
from treadle_server.fingerprint import fingerprint
from treadle_server.isolation import refused
from treadle_server.keys import key_digest
from treadle_server.metric_names import MetricName, gen_ai_names, vllm_names
from treadle_server.metrics import TREADLE_NAMES, Metrics
from treadle_server.observers import Observers
from treadle_server.outcomes import NUM_REQUESTS, CallOutcomes
from treadle_server.request_log import RequestLog
from treadle_server.request_metrics import RequestTimer
from treadle_server.responses.store import ResponseStore
from treadle_server.sampling import to_params
from treadle_server.wire.common import SamplingFields

if TYPE_CHECKING:
    from treadle.plugins import PluginManager
    from treadle_server.app_instance import AppInstance
    from treadle_server.batches.service import BatchService

__all__ = ("ServerContext",)


class ServerContext:
    """One server around one started engine.

    ``draining`` is set when it is going to stop, ``is_dead`` when the engine has stopped, ``is_hung``
    while the engine does not answer, and ``stuck_calls`` then says in which calls of plugins it is, if it is
    in any; ``stats`` is what it returned last. ``chat_processor`` prepares chats
    with the parsers that are used. ``observers`` are told of each prompt that the engine has answered.
    """

    app_instance: AppInstance
    """The application that answers requests, set by ``create_app``."""
    batches: BatchService | None = None
    """Set when the server starts, if there is a folder for files."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.names = list(engine.config.model.served_model_name) or [engine.config.model.model]
        self.model = self.names[0]
        self.started = int(time.time())
        self.defaults: SamplingParams = engine.assets.defaults
        self.active_requests = ActiveRequests(config.request_timeout)
        self.metrics = Metrics(
            self.model,
            engine.plugins.call_stats,
            names=chosen_names(config.metric_names, engine.info.max_model_len),
            cache_config=cache_config(engine),
            of_plugins=config.enable_plugin_metrics,
        )
        self.observers = Observers()
        self.request_log = RequestLog(config)
        self._call_outcomes = CallOutcomes()
        self.draining = False
        self.is_dead: EngineDeadError | None = None
        self.is_hung: EngineDeadError | None = None
        self.stuck_calls = ""
        self.stats: EngineStats | None = None
        self.chat_processor = engine.assets.chats(
            engine.config,
            engine.plugins,
            InputProcessor(engine.info, engine.assets),
            engine.texts,
            watchdog=engine.parser_watchdog,
            on_failure=self.metrics.count_parser_failure,
        )
        self.plugin_code = codes(engine.plugins)
        self.fingerprint = system_fingerprint(engine, self.plugin_code)
        self.knows_developer = knows_developer(engine)
        self.responses = ResponseStore(
            config.max_stored_responses, config.max_stored_response_bytes
        )
        self.reloading = asyncio.Lock()

    def close(self) -> None:
        self.engine.texts.close()
        self.engine.parser_watchdog.close()

    def use_plugins(self, plugins: PluginManager, app: AppInstance | None) -> None:
        """Use other plugins from now on, and another application unless it is ``None``."""
        self.engine.plugins = plugins
        self.chat_processor = ChatProcessor(
            self.chat_processor.processor,
            self.parsers_from(plugins),
            self.engine.texts,
        )
        self.plugin_code = codes(plugins)
        self.fingerprint = system_fingerprint(self.engine, self.plugin_code)
        self.engine.parser_watchdog.close()
        if app is not None:
            self.app_instance, old = app, self.app_instance
            old.stop_when_idle()

    def parsers_from(self, plugins: PluginManager) -> ParserPlugins:
        """Return the parsers in use, made by other plugins."""
        parsers = self.chat_processor.parser_plugins
        return ParserPlugins(
            plugins,
            parsers.tokenizer,
            parsers.keys,
            watchdog=parsers.watchdog,
            on_failure=parsers.on_failure,
        )

    def timer(self) -> RequestTimer:
        """Return what measures a request that begins now."""
        return RequestTimer(self.metrics, has_histograms=self.config.enable_request_metrics)

    def check_alive(self) -> None:
        """Raise ``EngineDeadError`` or ``APIError`` unless the engine was alive at the last check."""
        if self.is_dead is not None:
            raise self.is_dead
        if not self.engine.alive:
            raise EngineDeadError("the engine has stopped")
        if self.is_hung is not None:
            raise APIError(
                503,
                f"a step of the engine has not ended for {self.config.hang_timeout:g} s (hang_timeout)"
                + (f": {self.stuck_calls}" if self.stuck_calls else ""),
                code="engine_unresponsive",
            )

    def broken_plugins(self) -> list[str]:
        """Return the plugins that fail again and again, in this process or in the engine's."""
        rows = {"server": self.engine.plugins.call_stats.rows()}
        if self.stats is not None:
            rows["engine"] = list(self.stats.plugin_calls)
        names = self._call_outcomes.broken(rows, self.engine.parser_watchdog)
        return sorted({*names, *refused(self.engine.plugins)})

    def check_outcomes(self) -> None:
        """Raise ``APIError`` if all of the last requests have failed."""
        if self.metrics.outcomes.all_failed:
            plugins = ", ".join(self.broken_plugins()) or "none of them"
            raise APIError(
                503,
                f"the last {NUM_REQUESTS} requests have failed (plugins that fail: {plugins}); see the log",
                code="requests_fail",
            )

    def need_batches(self) -> BatchService:
        """Raises ``APIError`` if there is no folder for files."""
        if self.batches is None:
            raise APIError(
                404,
                "files and batches are not enabled on this server; start it with --files-dir DIR",
                code="files_disabled",
            )
        return self.batches

    def check_model(self, name: str | None) -> None:
        """Raise unless ``name`` is served; no name is the first one."""
        if name is None or name == "" or name in self.names:
            return
        if len(name) > 256:
            raise RequestError("model has more than 256 characters", param="model")
        model_names = ", ".join(self.names)
        raise ModelNotFoundError(
            f"the model {name!r} does not exist here; this server has: {model_names}", param="model"
        )

    def to_params(self, request: SamplingFields, client: str, **changes: Any) -> SamplingParams:
        """Return the sampling parameters of a request, with no more output tokens than the
        checkpoint's ``max_new_tokens``, unless it sets ``ignore_eos``. Raises ``RequestError``.

        The prefix cache is salted by API key: how fast a prompt is would tell one client what
        another has asked.
        """
        params = to_params(request, self.defaults, self.engine.info.max_model_len, **changes)
        if self.config.api_key and not self.config.share_prefix_cache:
            salt = hashlib.sha256(f"{client} {params.cache_salt or ''}".encode()).hexdigest()
            params = params.replace(cache_salt=salt)
        limit, requested = self.engine.assets.output_limit, params.max_tokens
        if limit is None or requested is None or requested <= limit or params.ignore_eos:
            return params
        return params.replace(max_tokens=max(limit, params.min_tokens))

    def new_id(self, prefix: str) -> str:
        """Return an id that cannot be guessed and does not depend on the client's request id."""
        return f"{prefix}-{secrets.token_hex(16)}"

    def client_of(self, request: Request[Any, Any, Any]) -> str:
        """Return who gets one share of the threads for texts: whoever has the key, or an address."""
        if self.config.api_key:
            return key_digest(dict(cast("Any", request.scope)["headers"])).hex()
        return request.client.host if request.client is not None else ""

    def owner_of(self, request: Request[Any, Any, Any]) -> str:
        """Return whose responses a request may use: those of its key. Without keys all are one."""
        return self.client_of(request) if self.config.api_key else ""


def chosen_names(tables: Sequence[str], max_model_len: int) -> list[MetricName]:
    """Return the names of metrics in the tables that the option ``metric_names`` lists."""
    names: list[MetricName] = list(TREADLE_NAMES) if "treadle" in tables else []
    if "vllm" in tables:
        names += vllm_names(max_model_len)
    return [*names, *gen_ai_names()] if "gen_ai" in tables else names


def cache_config(engine: Engine) -> tuple[str, ...]:
    """Return the values of the labels of ``cache_config_info`` after the number of pages."""
    cache = engine.config.cache
    return (
        str(engine.info.page_size),
        cache.kv_cache_dtype,
        str(cache.enable_prefix_caching),
        str(cache.gpu_memory_utilization),
    )


def system_fingerprint(engine: Engine, code: Mapping[str, str]) -> str:
    """Return the fingerprint of the model, its configuration and the plugins, without served names.

    ``code`` has the hashes of the plugins' files.
    """
    config = engine.config
    model = msgspec.structs.replace(config.model, served_model_name=[])
    parts = (model, config.cache, config.device, config.plugins, engine.assets.traits.config, code)
    return fingerprint(engine.plugins, *parts)


def knows_developer(engine: Engine) -> bool:
    """Whether the chat template distinguishes the role ``developer`` from ``system``."""
    try:
        return "developer" in (engine.tokenizer.chat_template or "")
    except CheckpointError:
        return False
