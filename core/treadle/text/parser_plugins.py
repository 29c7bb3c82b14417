"""Every call of the plugins of a chat: choosing parsers, building them, asking what they need."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from treadle.api.kinds import REASONING_PARSERS, TOOL_PARSERS
from treadle.api.parsers import SupportsSpecialTags, Tool
from treadle.api.plugin_kind import PluginKind
from treadle.api.sampling_params import StructuredOutputsParams
from treadle.errors import EngineError, PluginLoadError, RequestError, TreadleError
from treadle.known_plugins import DISTRIBUTIONS
from treadle.loading.matching import NONE, Decision, decide
from treadle.plugins.entries import normal
from treadle.plugins.guard import strict_error
from treadle.processes.watchdog import WatchdogExecutor
from treadle.text.output_parser import GuardedParser, OutputParser
from treadle.text.special_tokens import SpecialTokenFilter
from treadle.text.tool_choice import to_guided

if TYPE_CHECKING:
    from treadle.api.files import Tokenizer
    from treadle.api.matching import ModelTraits
    from treadle.api.parsers import ToolParser
    from treadle.api.structured_output import GrammarSpec
    from treadle.config import ModelConfig
    from treadle.plugins import PluginManager
    from treadle.plugins.call_stats import PluginCallStats
    from treadle.plugins.guard import PluginGuard

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

    def check(self, option: str, key: str, *, feed: bool = False) -> None:
        """Open a parser, and with ``feed`` let it read a word. Raises what it raises."""
        parser, _ = self._open(PARSER_KINDS[option], key)
        if feed:
            parser.feed("treadle", ())
            parser.finish()

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
        if reasoning and self.reasoning_parser is not None:
            think = self._guarded("reasoning_parser", prompt=prompt)
        if tools and self.tool_call_parser is not None:
            calls = self._guarded("tool_call_parser", tools=tools)
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
        if tools and self.tool_call_parser is not None:
            ids |= await self._tag_ids(TOOL_PARSERS, self.tool_call_parser)
        if reasoning and self.reasoning_parser is not None:
            ids |= await self._tag_ids(REASONING_PARSERS, self.reasoning_parser)
        return ids

    async def forced_call(
        self, tools: Sequence[Tool], choice: str | Mapping[str, Any]
    ) -> StructuredOutputsParams:
        """Return the constraint that makes the model call a tool.

        Raises ``RequestError`` if the parser has none.
        """
        key, guided = self.tool_call_parser or "", None

        def grammar() -> GrammarSpec | None:
            parser: ToolParser = self._open(TOOL_PARSERS, key, tools=tools)[0]
            return parser.grammar_for_tool_choice(choice)

        try:
            spec = await self._call(TOOL_PARSERS, key, "grammar_for_tool_choice", grammar)
            guided = None if spec is None else to_guided(spec)
        except PluginLoadError as error:
            log.warning("tool_call_parser=%s cannot force a call: %s", key, error, exc_info=error)
            self.on_failure(f"tool_call_parser={key}")
        if guided is None:
            raise RequestError(
                f"the tool parser {key} cannot force a call; send tool_choice auto",
                param="tool_choice",
            )
        return guided

    async def call_renderer(self, guard: PluginGuard | None, work: Callable[[], T]) -> T:
        """Return what a renderer makes, in a thread that can be abandoned.

        Raises the error of ``guard``, ``PluginLoadError``, if it does not return.
        """
        if self.watchdogs is None or guard is None:
            return work()
        try:
            return await self.watchdogs.renderer.submit(work)
        except TimeoutError as error:
            log.error("%s does not return: %s", guard.entry.id, error)
            guard.fail("render", error)

    @property
    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer, so its outputs cannot be parsed")
        return self.tokenizer

    def _open(
        self, kind: PluginKind[Any], key: str, *, tools: Sequence[Tool] = (), prompt: str = ""
    ) -> tuple[Any, bool]:
        """Return a new parser behind its boundary, and whether it may run on the event loop."""
        about: dict[str, Any] = {"tools": tools} if kind is TOOL_PARSERS else {"prompt": prompt}
        parser = self.host.create(kind, key, tokenizer=self._tokenizer, **about)
        # Read of the class: a property would run the plugin's code.
        inline = getattr(type(parser), "inline", None)
        if not isinstance(inline, bool):
            inline = self._is_inline(kind, key)
        return self.host.guarded(kind, key, parser), inline

    def _guarded(self, option: str, **about: Any) -> GuardedParser:
        kind, key = PARSER_KINDS[option], self.keys[option] or ""
        return GuardedParser(
            f"{option}={key}",
            partial(self._open, kind, key, **about),
            inline=self._is_inline(kind, key),
            strict=self.host.switches.strict,
            hung=lambda method: self.host.guard(kind, key).counter(method).failed(),
        )

    def _is_inline(self, kind: PluginKind[Any], key: str) -> bool:
        """Return whether a parser may run on the event loop before it has said so itself."""
        try:
            entry = self.host.choose(kind.name, key)
        except TreadleError:  # building it raises this again, where it is handled
            return False
        return entry.file is None and normal(entry.dist) in DISTRIBUTIONS

    async def _tag_ids(self, kind: PluginKind[Any], key: str) -> frozenset[int]:
        plugin = f"{kind.name}:{key}"
        if plugin not in self._special_ids:
            try:
                tags = await self._call(
                    kind, key, "special_tags", lambda: _tags_of(self._open(kind, key)[0])
                )
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
        """Return what a parser says outside of an output, in a thread unless it is treadle's own.

        Raises ``RequestError``, and ``PluginLoadError`` for every failure, in strict mode
        ``EngineError``.
        """
        try:
            if self.watchdogs is None or self._is_inline(kind, key):
                return work()
            return await self.watchdogs.parsers.submit(work)
        except TimeoutError as error:
            self.host.guard(kind, key).fail(method, error)
        except (RequestError, EngineError):
            raise
        except TreadleError as error:
            if self.host.switches.strict:
                raise strict_error(error) from error
            raise PluginLoadError(str(error)) from error


def _tags_of(parser: object) -> set[str]:
    return set(parser.special_tags) if isinstance(parser, SupportsSpecialTags) else set()
