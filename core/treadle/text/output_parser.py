"""Output parsers: from generated text to text, reasoning and tool calls.

One ``OutputParser`` reads one output. Streamed or not is the same code: a whole text is one piece.
A parser that raises or hangs costs its own work, never the answer: what it has taken without
answering for it comes out as text.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from treadle.api.parsers import (
    Delta,
    ReasoningDelta,
    StreamParser,
    SupportsCallIds,
    TextDelta,
    ToolCallDelta,
)
from treadle.errors import EngineError
from treadle.outputs import OutputPart, ReasoningPart, TextPart, ToolCall
from treadle.plugins.call_stats import PluginCallStats

if TYPE_CHECKING:
    from treadle.processes.watchdog import WatchdogExecutor
    from treadle.text.special_tokens import SpecialTokenFilter

__all__ = ("GuardedParser", "OutputParser", "checked_deltas", "merge_parts")

log = logging.getLogger("treadle.text")
MAX_ID_CHARS = 64


def checked_deltas(deltas: Iterable[Any]) -> list[Delta]:
    """Return what a parser returned, as a list.

    Raises ``TypeError`` or ``ValueError`` for what cannot be sent, half a surrogate pair included.
    """
    deltas = list(deltas)
    for delta in deltas:
        match delta:
            case TextDelta(str(text)) | ReasoningDelta(str(text)):
                text.encode()
            case ToolCallDelta(int(index), str() | None as name, str(text)) if index >= 0:
                text.encode()
                (name or "").encode()
            case _:
                raise TypeError(f"a parser returned {delta!r:.80}, not a delta that can be sent")
    return deltas


class GuardedParser:
    """One parser, and the text that it has not answered for yet.

    ``build`` makes the parser when there is something to feed it, and may raise like the parser
    itself. After the first exception the parser is not called again. Calls are counted in ``call_stats``
    for ``plugin`` (``kind:key``). With ``strict`` a failure is an ``EngineError``, which ends the
    request. ``inline`` is whether it runs in the thread of its caller, see ``RunsInline``.
    """

    def __init__(
        self,
        label: str,
        build: Callable[[], StreamParser],
        *,
        plugin: str = "",
        call_stats: PluginCallStats | None = None,
        strict: bool = False,
        inline: bool = True,
    ) -> None:
        self.label = label
        self.disabled = False
        self.pending = ""
        self.inline = inline
        self._build, self._plugin, self._call_stats = build, plugin, call_stats or PluginCallStats()
        self._strict = strict
        self._parser: StreamParser | None = None
        self._current_call: tuple[str, float] | None = None

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        if self.disabled:
            return [TextDelta(text)] if text else []
        self.pending += text
        return self._call("feed", lambda: self._opened().feed(text, ids))

    def finish(self) -> list[Delta]:
        if self.disabled:
            return []
        return self._call("finish", lambda: self._opened().finish())

    def call_id(self) -> str | None:
        """Return an id for a tool call, if the parser's format prescribes how ids look."""
        if self.disabled:
            return None
        parser: object = self._parser
        start_time = perf_counter()
        self._current_call = "call_id", start_time
        try:
            if not isinstance(parser, SupportsCallIds):
                return None
            made = parser.call_id()
            if 0 < len(made) <= MAX_ID_CHARS and made.isprintable():
                self._call_stats.done(self._plugin, "call_id", start_time)
                return made
            raise ValueError(f"a parser made the id {made!r:.80}")
        except BaseException as error:  # a plugin may raise anything, a panic too
            self._call_stats.failed(self._plugin, "call_id", start_time)
            log.warning("%s cannot make ids", self.label, exc_info=error)
            self._raise_if_strict(error)
            return None
        finally:
            self._current_call = None

    @property
    def is_called(self) -> bool:
        """Whether one of its methods is running."""
        return self._current_call is not None

    def disable(self) -> None:
        """Stop using the parser because its call timed out, or because too many others hang.

        Raises ``EngineError`` if it is strict.
        """
        if self._current_call is not None:
            self._call_stats.failed(self._plugin, *self._current_call)
            log.warning("%s does not return; its output is delivered as text", self.label)
        self.disabled = True
        if self._strict:
            raise EngineError(f"{self.label} does not return (plugin_strict makes it fatal)")

    def _opened(self) -> StreamParser:
        if self._parser is None:
            self._parser = self._build()
            # Read of the class: a property would run the plugin's code.
            inline = getattr(type(self._parser), "inline", None)
            self.inline = inline if isinstance(inline, bool) else self.inline
        return self._parser

    def _call(self, method: str, call: Callable[[], list[Delta]]) -> list[Delta]:
        start_time = perf_counter()
        self._current_call = method, start_time
        try:
            deltas = checked_deltas(call())
        except BaseException as error:  # a plugin may raise anything, a panic too
            self._call_stats.failed(self._plugin, method, start_time)
            log.warning("%s failed; its output is delivered as text", self.label, exc_info=error)
            self.disabled = True
            self._raise_if_strict(error)
            return [TextDelta(self.pending)] if self.pending else []
        finally:
            self._current_call = None
        self._call_stats.done(self._plugin, method, start_time)
        self._forget_answered(deltas)
        return deltas

    def _raise_if_strict(self, error: BaseException) -> None:
        if self._strict:
            text = f"{self.label} failed: {type(error).__name__}: {error}"
            raise EngineError(f"{text} (plugin_strict makes it fatal)") from error

    def _forget_answered(self, deltas: list[Delta]) -> None:
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

    The reasoning parser reads first, the tool parser what that leaves as text. ``max_calls`` drops
    the calls beyond it. Parsers that do not run inline are called by ``watchdog``; without one, all
    run in the caller's thread.
    """

    def __init__(
        self,
        reasoning: GuardedParser | None,
        tools: GuardedParser | None,
        *,
        max_calls: int | None = None,
        special_tokens: SpecialTokenFilter | None = None,
        watchdog: WatchdogExecutor | None = None,
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

        Waits only for parsers that do not run inline. Raises ``EngineError`` if a parser fails in
        strict mode.
        """
        if self._abandoned:
            return [TextPart(text)] if text else []
        if self._watchdog is None or all(p.inline or p.disabled for p in self._parsers):
            parts = self.feed(text, ids)
            return parts + self.finish() if last else parts
        unparsed = self.pending + text
        try:
            parts = await self._watchdog.submit(lambda: self._take(text, ids, last))
        except TimeoutError:  # the thread may still return, and changes nothing any more
            self._abandoned = True
            for parser in [p for p in self._parsers if p.is_called] or self._parsers:
                parser.disable()
            return [TextPart(unparsed)] if unparsed else []
        self.has_calls |= any(isinstance(part, ToolCall) for part in parts)
        return parts

    def feed(self, text: str, ids: Sequence[int]) -> list[OutputPart]:
        """Take the next piece of text and the ids that it was decoded from."""
        parts = self._take(text, ids, last=False)
        self.has_calls |= any(isinstance(part, ToolCall) for part in parts)
        return parts

    def finish(self) -> list[OutputPart]:
        """Return what was pending: the output has ended."""
        parts = self._to_parts(self._flush())
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
        found = self._reasoning.feed(text, ids)
        # The ids belong to the whole piece: a parser that gets a part of it gets none.
        is_whole = len(found) == 1 and isinstance(found[0], TextDelta) and found[0].text == text
        deltas: list[Delta] = []
        for delta in found:
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
        made = None if self._tools is None else self._tools.call_id()
        return ToolCall(
            index=delta.index,
            id=made or f"call_{secrets.token_hex(12)}",
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
    return [_joined(first, "".join(texts)) for first, texts in groups]


def _joined(first: OutputPart, text: str) -> OutputPart:
    if isinstance(first, ToolCall):
        return ToolCall(index=first.index, id=first.id, name=first.name, arguments=text)
    return type(first)(text)
