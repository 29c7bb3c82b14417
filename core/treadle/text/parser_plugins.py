"""Every call of the plugins of a chat: choosing parsers, building them, asking what they need."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from treadle.api.kinds import REASONING_PARSERS, TOOL_PARSERS
from treadle.api.parsers import SupportsSpecialTags, Tool
from treadle.api.plugin_kind import PluginKind
from treadle.api.sampling_params import StructuredOutputsParams
from treadle.errors import EngineError, PluginLoadError, RequestError, TreadleError
from treadle.known_plugins import DISTRIBUTIONS
from treadle.plugins.entries import normal
from treadle.plugins.matching import NONE, Decision, decide
from treadle.processes.watchdog import WatchdogExecutor
from treadle.text.output_parser import GuardedParser, OutputParser, checked_deltas
from treadle.text.special_tokens import SpecialTokenFilter
from treadle.text.tool_choice import to_guided

if TYPE_CHECKING:
    from treadle.api.files import Tokenizer
    from treadle.api.matching import ModelTraits
    from treadle.api.parsers import ReasoningParser, ToolParser
    from treadle.config import ModelConfig
    from treadle.plugins import PluginManager
    from treadle.plugins.call_stats import PluginCallStats

__all__ = ("PARSER_KINDS", "ParserPlugins", "PluginWatchdogs", "choose_parser")

T = TypeVar("T")
log = logging.getLogger("treadle.text")
PARSER_KINDS: Mapping[str, PluginKind[Any]] = {
    "tool_call_parser": TOOL_PARSERS,
    "reasoning_parser": REASONING_PARSERS,
}
"""Option of the engine, kind of plugin."""
RENDERER_THREADS = 2


def choose_parser(
    option: str, config: ModelConfig, plugins: PluginManager, traits: ModelTraits
) -> Decision:
    """Return what one option means for a model.

    Raises ``PluginConflictError`` if several parsers match equally well.
    """
    return decide(plugins, PARSER_KINDS[option], traits, getattr(config, option) or NONE)


class PluginWatchdogs:
    """The threads in which an event loop calls renderers, and parsers that do not run inline."""

    def __init__(self, call_stats: PluginCallStats) -> None:
        budgets = [call_stats.budget(f"{k.name}:", "feed") for k in PARSER_KINDS.values()]
        self.parsers = WatchdogExecutor(max(budgets))
        budget = call_stats.budget("renderers:", "render")
        self._renderers = [WatchdogExecutor(budget) for _ in range(RENDERER_THREADS)]

    @property
    def renderer(self) -> WatchdogExecutor:
        """The one with the fewest calls waiting."""
        return min(self._renderers, key=lambda executor: executor.num_waiting)

    def close(self) -> None:
        for executor in (self.parsers, *self._renderers):
            executor.close()


class ParserPlugins:
    """The output parsers of one model.

    ``tool_call_parser`` and ``reasoning_parser`` are the keys in use, ``None`` for none. Without
    ``watchdogs`` every call runs in the caller's thread, and no coroutine of this class ever waits.
    ``on_failure`` is called with the label (``tool_call_parser=name``) of a parser that failed.
    """

    def __init__(
        self,
        plugins: PluginManager,
        tokenizer: Tokenizer | None,
        keys: Mapping[str, str | None],
        *,
        watchdogs: PluginWatchdogs | None = None,
        on_failure: Callable[[str], None] = lambda label: None,
    ) -> None:
        """``keys`` holds the parser of each option of ``PARSER_KINDS``."""
        self.host = plugins
        self.tokenizer = tokenizer
        self.keys = dict(keys)
        self.tool_call_parser = self.keys["tool_call_parser"]
        self.reasoning_parser = self.keys["reasoning_parser"]
        self.watchdogs = watchdogs
        self.on_failure = on_failure
        self._special_ids: dict[str, frozenset[int]] = {}

    @classmethod
    def choose(
        cls,
        plugins: PluginManager,
        tokenizer: Tokenizer | None,
        traits: ModelTraits,
        config: ModelConfig,
        **options: Any,
    ) -> ParserPlugins:
        """Use the parsers that the options name, or those made for the model.

        Raises ``PluginConflictError`` if several parsers match equally well.
        """
        keys: dict[str, str | None] = {}
        for option in PARSER_KINDS:
            decision = choose_parser(option, config, plugins, traits)
            keys[option] = decision.key
            log.debug("%s: %s, %s", option, decision.key or NONE, decision.reason)
        return cls(plugins, tokenizer, keys, **options)

    def with_host(self, plugins: PluginManager) -> ParserPlugins:
        """Return the same parsers from another host, after a plugin was reloaded."""
        return ParserPlugins(
            plugins,
            self.tokenizer,
            self.keys,
            watchdogs=self.watchdogs,
            on_failure=self.on_failure,
        )

    def build_tool_parser(self, key: str, tools: Sequence[Tool] = ()) -> ToolParser:
        parser: ToolParser = self.host.create(
            TOOL_PARSERS, key, tokenizer=self._tokenizer, tools=tools
        )
        return parser

    def build_reasoning_parser(self, key: str, prompt: str = "") -> ReasoningParser:
        parser: ReasoningParser = self.host.create(
            REASONING_PARSERS, key, tokenizer=self._tokenizer, prompt=prompt
        )
        return parser

    def check(self, option: str, key: str, *, feed: bool = False) -> None:
        """Open a parser, and with ``feed`` let it read a word. Raises what it raises."""
        is_tools = option == "tool_call_parser"
        parser = self.build_tool_parser(key) if is_tools else self.build_reasoning_parser(key)
        if feed:
            checked_deltas([*parser.feed("treadle", ()), *parser.finish()])

    def check_all(self) -> None:
        """Open each parser once, so that a wrong name stops a start and not a request."""
        for option, key in self.keys.items():
            if key is not None:
                self.check(option, key)

    def output_parser(
        self,
        prompt: str,
        tools: Sequence[Tool],
        *,
        reasoning: bool = True,
        max_calls: int | None = None,
        hidden: frozenset[int] = frozenset(),
    ) -> OutputParser | None:
        """Return fresh parsers for one output of ``prompt``, ``None`` if no parser applies.

        The text of the special tokens ``hidden`` is removed.
        """
        think = calls = None
        if reasoning and (key := self.reasoning_parser) is not None:
            think = self._guarded(
                "reasoning_parser", key, partial(self.build_reasoning_parser, key, prompt)
            )
        if tools and (key := self.tool_call_parser) is not None:
            calls = self._guarded(
                "tool_call_parser", key, partial(self.build_tool_parser, key, tools)
            )
        if think is None and calls is None:
            return None
        return OutputParser(
            think,
            calls,
            max_calls=max_calls,
            special_tokens=SpecialTokenFilter(self._tokenizer, hidden) if hidden else None,
            watchdog=None if self.watchdogs is None else self.watchdogs.parsers,
        )

    async def special_tag_ids(self, *, tools: bool, reasoning: bool) -> frozenset[int]:
        """Return the special tokens that the parsers of a request must see. Each is asked once."""
        ids: frozenset[int] = frozenset()
        if tools and (key := self.tool_call_parser) is not None:
            ids |= await self._tag_ids(TOOL_PARSERS, key, partial(self.build_tool_parser, key))
        if reasoning and (key := self.reasoning_parser) is not None:
            ids |= await self._tag_ids(
                REASONING_PARSERS, key, partial(self.build_reasoning_parser, key)
            )
        return ids

    async def forced_call(
        self, tools: Sequence[Tool], choice: str | Mapping[str, Any]
    ) -> StructuredOutputsParams:
        """Return the constraint that makes the model call a tool.

        Raises ``RequestError`` if the parser has none.
        """
        key, guided = self.tool_call_parser or "", None

        def grammar() -> StructuredOutputsParams | None:
            spec = self.build_tool_parser(key, tools).grammar_for_tool_choice(choice)
            return None if spec is None else to_guided(spec)

        try:
            guided = await self._call(TOOL_PARSERS, key, "grammar", grammar)
        except PluginLoadError as error:
            log.warning("tool_call_parser=%s cannot force a call: %s", key, error, exc_info=error)
            self.on_failure(f"tool_call_parser={key}")
        if guided is None:
            raise RequestError(
                f"the tool parser {key} cannot force a call; send tool_choice auto",
                param="tool_choice",
            )
        return guided

    async def call_renderer(self, plugin: str, work: Callable[[], T]) -> T:
        """Return what a renderer makes, in a thread that can be abandoned.

        Raises ``PluginLoadError`` if it does not return.
        """
        if self.watchdogs is None:
            return work()
        start_time = time.perf_counter()
        try:
            return await self.watchdogs.renderer.submit(work)
        except TimeoutError as error:
            log.error("%s does not return: %s", plugin, error)
            self.host.call_stats.failed(plugin, "render", start_time)
            failure = PluginLoadError(f"{plugin} does not return")
            failure.plugin = plugin
            raise failure from error

    @property
    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer, so its outputs cannot be parsed")
        return self.tokenizer

    def _guarded(self, option: str, key: str, build: Callable[[], Any]) -> GuardedParser:
        kind, plugins = PARSER_KINDS[option], self.host
        return GuardedParser(
            f"{option}={key}",
            build,
            plugin=f"{kind.name}:{key}",
            call_stats=plugins.call_stats,
            strict=plugins.switches.strict,
            inline=self._is_inline(kind, key),
        )

    def _is_inline(self, kind: PluginKind[Any], key: str) -> bool:
        """Return whether a parser may run on the event loop before it has said so itself."""
        try:
            entry = self.host.choose(kind.name, key)
        except TreadleError:  # building it raises this again, where it is handled
            return False
        return entry.file is None and normal(entry.dist) in DISTRIBUTIONS

    async def _tag_ids(
        self, kind: PluginKind[Any], key: str, build: Callable[[], Any]
    ) -> frozenset[int]:
        plugin = f"{kind.name}:{key}"
        if plugin not in self._special_ids:
            try:
                tags = await self._call(kind, key, "tags", lambda: _tags_of(build()))
            except PluginLoadError as error:  # every output reports it
                log.warning("the tags of %s are not known: %s", plugin, error, exc_info=error)
                tags = set()
            tokenizer = self._tokenizer
            ids = tokenizer.special_token_ids if tags else ()
            self._special_ids[plugin] = frozenset(
                i for i in ids if tokenizer.id_to_token(i) in tags
            )
        return self._special_ids[plugin]

    async def _call(self, kind: PluginKind[Any], key: str, method: str, work: Callable[[], T]) -> T:
        """Return what a parser says outside of an output; the call is counted.

        Raises ``PluginLoadError``, in strict mode ``EngineError``, whatever the plugin raises; but
        a ``RequestError`` is the client's.
        """
        plugins, start_time = self.host, time.perf_counter()
        guard = plugins.guard(kind, key)

        def guarded() -> T:
            with guard.call_context(method):
                return work()

        try:
            if self.watchdogs is None or self._is_inline(kind, key):
                return guarded()
            return await self.watchdogs.parsers.submit(guarded)
        except RequestError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError):
                plugins.call_stats.failed(f"{kind.name}:{key}", method, start_time)
            is_ours = isinstance(error, TreadleError)
            text = str(error) if is_ours else guard.entry.failure(method, error)
            if plugins.switches.strict:
                raise EngineError(f"{text} (plugin_strict makes it fatal)") from error
            raise PluginLoadError(text) from error


def _tags_of(parser: object) -> set[str]:
    return set(parser.special_tags) if isinstance(parser, SupportsSpecialTags) else set()
