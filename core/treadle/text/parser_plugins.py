"""Every call of the plugins of a chat: choosing parsers, building them, asking what they need."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from treadle.api.kinds import REASONING_PARSERS, TOOL_PARSERS
from treadle.api.parsers import SupportsSpecialTags, Tool
from treadle.api.plugin_kind import PluginKind
from treadle.api.sampling_params import THINKING_BUDGET
from treadle.errors import EngineError, PluginLoadError, RequestError, TreadleError
from treadle.known_plugins import DISTRIBUTIONS, install_hint
from treadle.plugins.entries import normal
from treadle.processes.failure import strict_error
from treadle.processes.watchdog import PluginThreads
from treadle.text.output_parser import GuardedParser, OutputParser
from treadle.text.special_tokens import SpecialTokenFilter

if TYPE_CHECKING:
    from treadle.api.files import Tokenizer
    from treadle.api.parsers import ToolParser
    from treadle.api.structured_output import GrammarSpec
    from treadle.plugins import PluginManager
    from treadle.plugins.call_stats import PluginCallStats
    from treadle.text.chat import PreparedChat

__all__ = ("PARSER_KINDS", "ParserPlugins", "parser_watchdog")

T = TypeVar("T")
log = logging.getLogger("treadle.text")
PARSER_KINDS: Mapping[str, PluginKind[Any]] = {
    "tool_call_parser": TOOL_PARSERS,
    "reasoning_parser": REASONING_PARSERS,
}
"""Option of the engine, kind of plugin."""


def parser_watchdog(call_stats: PluginCallStats) -> PluginThreads:
    """Return what calls the parsers that do not run on an event loop."""
    return PluginThreads(max(call_stats.budget(k, "feed") for k in PARSER_KINDS.values()))


class ParserPlugins:
    """The output parsers of one model.

    ``tool_call_parser`` and ``reasoning_parser`` are the keys in use, ``None`` for none. Without
    ``watchdog`` every call runs in the caller's thread, and no coroutine of this class ever waits.
    ``on_failure`` is called with the label (``tool_call_parser=name``) of a parser that failed.
    """

    def __init__(
        self,
        plugins: PluginManager,
        tokenizer: Tokenizer | None,
        keys: Mapping[str, str | None],
        *,
        watchdog: PluginThreads | None = None,
        on_failure: Callable[[str], None] = lambda label: None,
    ) -> None:
        """``keys`` holds the parser of each option of ``PARSER_KINDS``."""
        self.plugins = plugins
        self.tokenizer = tokenizer
        self.keys = dict(keys)
        self.tool_call_parser = self.keys["tool_call_parser"]
        self.reasoning_parser = self.keys["reasoning_parser"]
        self.watchdog = watchdog
        self.on_failure = on_failure
        self._tag_ids: dict[str, frozenset[int]] = {}

    def output_parser(self, chat: PreparedChat) -> OutputParser | None:
        """Return fresh parsers for one output of a chat, ``None`` if no parser applies."""
        reasoning = tools = None
        if chat.conversation.separate_reasoning and self.reasoning_parser is not None:
            reasoning = self._guarded("reasoning_parser", prompt=chat.prompt.text or "")
        if chat.tools and self.tool_call_parser is not None:
            tools = self._guarded("tool_call_parser", tools=chat.tools)
        if reasoning is None and tools is None:
            return None
        return OutputParser(
            reasoning,
            tools,
            max_calls=None if chat.conversation.parallel_tool_calls else 1,
            special_tokens=self.token_filter(chat.tag_ids) if chat.tag_ids else None,
            watchdog=self.watchdog,
        )

    async def tag_ids(self, *, tools: bool, reasoning: bool) -> frozenset[int]:
        """Return the tokens that are tags in the formats of a request. Each parser is asked once."""
        ids: frozenset[int] = frozenset()
        if tools and self.tool_call_parser is not None:
            ids |= await self._ask_tag_ids(TOOL_PARSERS, self.tool_call_parser)
        if reasoning and self.reasoning_parser is not None:
            ids |= await self._ask_tag_ids(REASONING_PARSERS, self.reasoning_parser)
        return ids

    async def with_thinking_budget(self, chat: PreparedChat, budget: int) -> PreparedChat:
        """Return ``chat`` with a thought of at most ``budget`` tokens, if it can have one.

        Raises ``RequestError`` if nothing ends thoughts of this model, and what ``call`` raises.
        """
        error = partial(RequestError, param="thinking_token_budget")
        key, tokenizer = self.reasoning_parser, self.tokenizer
        if THINKING_BUDGET not in self.plugins.keys("logits_processors"):
            hint = install_hint("treadle-thinking-budget")
            raise error(f"thinking_token_budget needs a logits processor; {hint}")
        if key is None or tokenizer is None:
            raise error(
                "thinking_token_budget needs a reasoning parser, and none matches this model"
            )

        def thought() -> tuple[bool, str, str]:
            parser = self.open(REASONING_PARSERS, key, prompt=chat.prompt.text or "")[0]
            begin, end = (getattr(parser, f"{name}_tag", None) for name in ("opening", "closing"))
            return parser.in_reasoning, begin or "", end or ""

        is_open, *tags = await self.call(REASONING_PARSERS, key, "closing_tag", thought)
        begin, end = (tokenizer.encode(tag, add_special_tokens=False) for tag in tags)
        params = chat.params.replace(thinking_token_budget=None)
        if not (is_open or begin):  # the prompt has ended the thought, or there can be none
            return replace(chat, params=params)
        is_tag = len(end) == 1 or not tokenizer.special_token_ids.isdisjoint(end[:1])
        if not is_tag or not (is_open or len(begin) == 1):
            raise error(
                f"thinking_token_budget cannot be kept: the reasoning parser {key} names no tokens of this "
                "model that end a thought; leave it out, or bound the whole output with max_tokens"
            )
        stops = await self.tag_ids(tools=bool(chat.tools), reasoning=True)
        num_ids = len(chat.prompt.ids or ())
        arguments = {
            "max_tokens": budget,
            "prompt_tokens": min(num_ids, params.truncate_prompt_tokens or num_ids),
            "begin": begin or None,
            "end": end,
            "stops": sorted(stops.difference(begin))[:64],
        }
        extra_args = {**(params.extra_args or {}), THINKING_BUDGET: arguments}
        return replace(chat, params=params.replace(extra_args=extra_args))

    async def forced_call(
        self, tools: Sequence[Tool], choice: str | Mapping[str, Any]
    ) -> GrammarSpec:
        """Return the grammar that makes the model call a tool. Raises ``RequestError`` if there is none,
        and ``PluginError`` if the parser does not come back."""
        key, spec = self.tool_call_parser or "", None

        def grammar() -> GrammarSpec | None:
            parser: ToolParser = self.open(TOOL_PARSERS, key, tools=tools)[0]
            return parser.grammar_for_tool_choice(choice)

        try:
            spec = await self.call(TOOL_PARSERS, key, "grammar_for_tool_choice", grammar)
        except PluginLoadError as error:
            log.warning("tool_call_parser=%s cannot force a call: %s", key, error, exc_info=error)
            self.on_failure(f"tool_call_parser={key}")
            if isinstance(error.__cause__, TimeoutError):
                raise
        if spec is None:
            raise RequestError(
                f"the tool parser {key} cannot force a call; send tool_choice auto",
                param="tool_choice",
            )
        return spec

    def token_filter(self, shown: frozenset[int] = frozenset()) -> SpecialTokenFilter:
        """Return what removes special tokens, but for ``shown``, from the text of an output."""
        tokenizer = self.need_tokenizer()
        return SpecialTokenFilter(tokenizer, tokenizer.special_token_ids - shown)

    def need_tokenizer(self) -> Tokenizer:
        """Raises ``RequestError`` if there is none."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer, so its outputs cannot be parsed")
        return self.tokenizer

    def open(
        self, kind: PluginKind[Any], key: str, *, tools: Sequence[Tool] = (), prompt: str = ""
    ) -> tuple[Any, bool]:
        """Return a new parser behind its boundary, and whether it may run on the event loop."""
        arguments: dict[str, Any] = {"tools": tools} if kind is TOOL_PARSERS else {"prompt": prompt}
        parser = self.plugins.create(kind, key, tokenizer=self.need_tokenizer(), **arguments)
        # Read of the class: a property would run the plugin's code.
        inline = getattr(type(parser), "inline", None)
        if not isinstance(inline, bool):
            inline = self._is_inline(kind, key)
        return self.plugins.guarded(kind, key, parser), inline

    def _guarded(self, option: str, **arguments: Any) -> GuardedParser:
        kind, key = PARSER_KINDS[option], self.keys[option] or ""
        return GuardedParser(
            f"{option}={key}",
            partial(self.open, kind, key, **arguments),
            inline=self._is_inline(kind, key),
            strict=self.plugins.switches.strict,
            plugin=f"{kind.name}:{key}",
            hung=lambda method: self.plugins.guard(kind, key).counter(method).record_failure(),
        )

    def _is_inline(self, kind: PluginKind[Any], key: str) -> bool:
        """Return whether a parser may run on the event loop before it has said so itself."""
        try:
            entry = self.plugins.choose(kind.name, key)
        except TreadleError:  # building it raises this again, where it is handled
            return False
        is_here = entry.file is None and entry.plugin not in self.plugins.loader.isolated
        return is_here and normal(entry.dist) in DISTRIBUTIONS

    async def _ask_tag_ids(self, kind: PluginKind[Any], key: str) -> frozenset[int]:
        plugin = f"{kind.name}:{key}"
        if plugin not in self._tag_ids:
            try:
                tags = await self.call(
                    kind, key, "special_tags", lambda: _tags_of(self.open(kind, key)[0])
                )
            except PluginLoadError as error:  # every output reports it
                log.warning("the tags of %s are not known: %s", plugin, error, exc_info=error)
                tags = ()
            tokenizer = self.need_tokenizer()
            ids = {i for i in tokenizer.special_token_ids if tokenizer.id_to_token(i) in tags}
            encoded = (tokenizer.encode(tag, add_special_tokens=False) for tag in tags)
            self._tag_ids[plugin] = frozenset(ids.union(e[0] for e in encoded if len(e) == 1))
        return self._tag_ids[plugin]

    async def call(self, kind: PluginKind[Any], key: str, method: str, work: Callable[[], T]) -> T:
        """Return what a parser says outside of an output, in a thread unless it is quick, and treadle's own.

        Raises ``RequestError``, and ``PluginLoadError`` for every failure, in strict mode ``EngineError``.
        """
        try:  # how long a grammar takes, the schemas of a client decide
            is_quick = method != "grammar_for_tool_choice" and self._is_inline(kind, key)
            if self.watchdog is None or is_quick:
                return work()
            return await self.watchdog[f"{kind.name}:{key}"].submit(work)
        except TimeoutError as error:
            self.plugins.guard(kind, key).fail(method, error)
        except (RequestError, EngineError):
            raise
        except TreadleError as error:
            if self.plugins.switches.strict:
                raise strict_error(error) from error
            raise PluginLoadError(str(error)) from error


def _tags_of(parser: object) -> Sequence[str]:
    return parser.special_tags if isinstance(parser, SupportsSpecialTags) else ()
