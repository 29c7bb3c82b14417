"""Output parsers: from generated text to text, reasoning and tool calls.

One ``OutputParser`` reads one output. Streamed or not is the same code: a whole text is one piece. A parser that
raises or hangs costs its own work, never the answer: what it has taken without answering for it comes out as text.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from treadle.api.parsers import Delta, StreamParser, SupportsCallIds, TextDelta, ToolCallDelta
from treadle.errors import EngineError, PluginLoadError, TreadleError
from treadle.outputs import OutputPart, ReasoningPart, TextPart, ToolCall
from treadle.processes.failure import strict_error

if TYPE_CHECKING:
    from treadle.processes.watchdog import PluginThreads
    from treadle.text.special_tokens import SpecialTokenFilter

__all__ = ("GuardedParser", "OutputParser", "merge_parts")

log = logging.getLogger("treadle.text")


class GuardedParser:
    """One parser, and the text that it has not answered for yet.

    ``build`` makes the parser when there is something to feed it, behind the boundary of its
    plugin, and tells whether it runs inline (see ``SupportsInlineCalls``); it may raise any ``TreadleError``.
    After the first error the parser is not called again. With ``strict`` an error is an
    ``EngineError``, which ends the request. ``hung`` is told the method that does not return.
    """

    def __init__(
        self,
        label: str,
        build: Callable[[], tuple[StreamParser, bool]],
        *,
        inline: bool = True,
        strict: bool = False,
        hung: Callable[[str], None] = lambda method: None,
        plugin: str = "",
    ) -> None:
        self.label, self.plugin = label, plugin
        self.disabled = False
        self.pending = ""
        self.inline = inline
        self.running = ""
        """The method that is running."""
        self._build, self._strict, self._hung = build, strict, hung
        self._parser: StreamParser | None = None

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        if self.disabled:
            return [TextDelta(text)] if text else []
        self.pending += text
        return self._call("feed", text, ids)

    def finish(self) -> list[Delta]:
        return [] if self.disabled else self._call("finish")

    def call_id(self) -> str | None:
        """Return an id for a tool call, if the parser's format prescribes how ids look."""
        parser: object = self._parser
        if self.disabled or not isinstance(parser, SupportsCallIds):
            return None
        self.running = "call_id"
        try:
            return parser.call_id()
        except PluginLoadError as error:
            log.warning("%s cannot make ids", self.label, exc_info=error)
            return None
        finally:
            self.running = ""

    def disable(self) -> None:
        """Stop using the parser because its call timed out, or because too many others hang.

        Raises ``EngineError`` if it is strict.
        """
        if self.running:
            self._hung(self.running)
            log.warning("%s does not return; its output is delivered as text", self.label)
        self.disabled = True
        if self._strict:
            raise strict_error(f"{self.label} does not return")

    def _call(self, method: str, *arguments: Any) -> list[Delta]:
        self.running = method
        try:
            if self._parser is None:
                self._parser, self.inline = self._build()
            deltas: list[Delta] = getattr(self._parser, method)(*arguments)
        except TreadleError as error:
            log.warning("%s; its output is delivered as text", error, exc_info=error)
            self.disabled = True
            if isinstance(error, EngineError):
                raise
            if self._strict:
                raise strict_error(error) from error
            return [TextDelta(self.pending)] if self.pending else []
        finally:
            self.running = ""
        self._drop_answered(deltas)
        return deltas

    def _drop_answered(self, deltas: list[Delta]) -> None:
        """Remove from the pending text what ``deltas`` answer for."""
        if not deltas:
            return
        if all(isinstance(d, TextDelta) for d in deltas):
            text = "".join(d.text for d in deltas if isinstance(d, TextDelta))
            if self.pending.startswith(text):
                self.pending = self.pending[len(text) :]
                return
        self.pending = ""


class OutputParser:
    """The parsers of one output, after the filter of special tokens if there is one.

    The reasoning parser reads first, the tool parser what that leaves as text. ``max_calls`` drops the calls beyond
    it. Parsers that do not run inline are called by ``watchdog``; without one, all run in the caller's thread.
    """

    def __init__(
        self,
        reasoning: GuardedParser | None,
        tools: GuardedParser | None,
        *,
        max_calls: int | None = None,
        special_tokens: SpecialTokenFilter | None = None,
        watchdog: PluginThreads | None = None,
    ) -> None:
        self._special_tokens = special_tokens
        self._reasoning = reasoning
        self._tools = tools
        self._parsers = [parser for parser in (reasoning, tools) if parser is not None]
        self._max_calls = max_calls
        self._watchdog = watchdog
        self._abandoned = False
        self._call_indices: set[int] = set()
        self.has_calls = False
        """Whether a tool call was delivered."""

    @property
    def pending(self) -> str:
        """The text that was fed and has not been delivered in any form."""
        filtered = "" if self._special_tokens is None else self._special_tokens.pending
        return "".join(parser.pending for parser in reversed(self._parsers)) + filtered

    @property
    def failure(self) -> list[str]:
        """The labels of the parsers that raised or hang."""
        return [parser.label for parser in self._parsers if parser.disabled]

    async def parse(self, text: str, ids: Sequence[int], *, last: bool) -> list[OutputPart]:
        """Return what the next piece of the output completes; ``last``, all that was pending.

        Waits only for parsers that do not run inline. Raises ``EngineError`` if a parser fails in strict mode.
        """
        if self._abandoned:
            return [TextPart(text)] if text else []
        watched = [p for p in self._parsers if not (p.inline or p.disabled)]
        threads = None
        if self._watchdog is not None and watched:
            threads = self._watchdog[" ".join(parser.plugin for parser in watched)]
            if threads.is_broken and monotonic() < threads.retry_time and not self.pending:
                threads = None
                for parser in watched:
                    parser.disable()
        if threads is None:
            parts = self._take(text, ids, last)
        else:
            unparsed = self.pending + text
            try:
                parts = await threads.submit(lambda: self._take(text, ids, last))
            except TimeoutError:  # the thread may still return, and changes nothing any more
                self._abandoned = True
                for parser in [p for p in self._parsers if p.running] or watched:
                    parser.disable()
                return [TextPart(unparsed)] if unparsed else []
        self.has_calls |= any(isinstance(part, ToolCall) for part in parts)
        return parts

    def _take(self, text: str, ids: Sequence[int], last: bool) -> list[OutputPart]:
        if self._special_tokens is not None:
            text = self._special_tokens.feed(text, ids)
        parts = self._to_parts(self._read(text, ids))
        return parts + self._to_parts(self._flush()) if last else parts

    def _flush(self) -> list[Delta]:
        rest = "" if self._special_tokens is None else self._special_tokens.finish()
        deltas = self._read(rest, ()) if rest else []
        if self._reasoning is not None:
            for delta in self._reasoning.finish():
                deltas += self._read_calls(delta, ())
        if self._tools is not None:
            deltas += self._tools.finish()
        return deltas

    def _read(self, text: str, ids: Sequence[int]) -> list[Delta]:
        if self._reasoning is None:
            return self._read_calls(TextDelta(text), ids)
        reasoning_deltas = self._reasoning.feed(text, ids)
        # The ids belong to the whole piece: a parser that gets a part of it gets none.
        is_whole = (
            len(reasoning_deltas) == 1
            and isinstance(reasoning_deltas[0], TextDelta)
            and reasoning_deltas[0].text == text
        )
        deltas: list[Delta] = []
        for delta in reasoning_deltas:
            deltas += self._read_calls(delta, ids if is_whole else ())
        return deltas

    def _read_calls(self, delta: Delta, ids: Sequence[int]) -> list[Delta]:
        if isinstance(delta, TextDelta) and self._tools is not None:
            return self._tools.feed(delta.text, ids)
        return [delta]

    def _to_parts(self, deltas: list[Delta]) -> list[OutputPart]:
        """Drop empty deltas and calls beyond the limit, and give each call its id."""
        parts: list[OutputPart] = []
        for delta in deltas:
            if isinstance(delta, ToolCallDelta):
                if self._max_calls is None or delta.index < self._max_calls:
                    parts.append(self._to_call(delta))
            elif delta.text:
                form = TextPart if isinstance(delta, TextDelta) else ReasoningPart
                parts.append(form(delta.text))
        return parts

    def _to_call(self, delta: ToolCallDelta) -> ToolCall:
        if delta.index in self._call_indices:
            return ToolCall(index=delta.index, arguments=delta.arguments)
        self._call_indices.add(delta.index)
        call_id = None if self._tools is None else self._tools.call_id()
        return ToolCall(
            index=delta.index,
            id=call_id or f"call_{secrets.token_hex(12)}",
            name=delta.name or "",
            arguments=delta.arguments,
        )


def merge_parts(parts: Iterable[OutputPart]) -> list[OutputPart]:
    """Join pieces: neighbouring texts of one type, and the pieces of each call at its first."""
    groups: list[tuple[OutputPart, list[str]]] = []
    calls: dict[int, list[str]] = {}
    for part in parts:
        if isinstance(part, ToolCall):
            if part.index in calls:
                calls[part.index].append(part.arguments)
            else:
                calls[part.index] = [part.arguments]
                groups.append((part, calls[part.index]))
        elif groups and type(part) is type(groups[-1][0]):
            groups[-1][1].append(part.text)
        else:
            groups.append((part, [part.text]))
    return [_join(first, texts) for first, texts in groups]


def _join(first: OutputPart, texts: list[str]) -> OutputPart:
    text = "".join(texts)
    if isinstance(first, ToolCall):
        return ToolCall(index=first.index, id=first.id, name=first.name, arguments=text)
    return type(first)(text)
