"""Output parsers, guarded: a parser that raises or hangs costs its own work, never the answer.

One ``Splitter`` stands between the text of one output and the wire. It feeds the reasoning parser,
what that leaves to the tool parser, and returns deltas. Streamed or not is the same code: the whole
text is one feed.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any

from treadle.api.parsers import (
    CallIds,
    Delta,
    ReasoningDelta,
    StreamParser,
    TextDelta,
    ToolCallDelta,
)
from treadle.errors import EngineError
from treadle.plugins.call_stats import PluginCallStats
from treadle_server.markers import Sieve
from treadle_server.matching import PARSERS
from treadle_server.watch import Watch

__all__ = ("Guard", "Splitter", "WatchedSplitter", "checked")

log = logging.getLogger("treadle.server")

Report = Callable[[str], None]


def checked(found: Iterable[Any]) -> list[Delta]:
    """What a parser returned, as a list. Raises ``TypeError`` or ``ValueError`` if it cannot be
    sent, which includes half a surrogate pair."""
    deltas = list(found)
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


class Guard:
    """One parser and the text that it has not answered for yet.

    ``build`` makes the parser when there is something to feed it; it may raise like the parser
    itself. After the first exception the parser is not called again, and everything that it had
    taken without saying anything about it comes out as text. Calls are counted in ``tally``. With
    ``strict`` a failure is an ``EngineError``, which ends the request.
    """

    def __init__(
        self,
        name: str,
        build: Callable[[], StreamParser],
        report: Report,
        tally: PluginCallStats | None = None,
        *,
        strict: bool = False,
    ) -> None:
        self.name = name
        self.broken = False
        self.pending = ""
        option, _, key = name.partition("=")
        self._plugin = f"{PARSERS[option].name if option in PARSERS else option}:{key}"
        self._build, self._report, self._tally = build, report, tally or PluginCallStats()
        self._strict = strict
        self._parser: StreamParser | None = None
        self._calling: tuple[str, float] | None = None

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        if self.broken:
            return [TextDelta(text)] if text else []
        self.pending += text
        return self._guarded("feed", lambda: self._opened().feed(text, ids))

    def finish(self) -> list[Delta]:
        if self.broken:
            return []
        return self._guarded("finish", lambda: self._opened().finish())

    def call_id(self) -> str | None:
        """An id of the parser's own making, if its format asks for one."""
        if self.broken:
            return None
        parser: object = self._parser
        began = perf_counter()
        self._calling = "call_id", began
        try:
            if not isinstance(parser, CallIds):
                return None
            made = parser.call_id()
            if 0 < len(made) <= 64 and made.isprintable():
                self._tally.done(self._plugin, "call_id", began)
                return made
            raise ValueError(f"a parser made the id {made!r:.80}")
        except BaseException as error:  # a plugin may raise anything, a panic too
            self._tally.failed(self._plugin, "call_id", began)
            log.warning("%s cannot make ids", self.name, exc_info=error)
            self._end(error)
            return None
        finally:
            self._calling = None

    @property
    def called(self) -> bool:
        """Whether it is inside a call now."""
        return self._calling is not None

    def give_up(self) -> None:
        """It does not come back from a call, or is not called because others do not."""
        if (calling := self._calling) is not None:
            self._tally.failed(self._plugin, *calling)
            log.warning("%s does not come back; its output is delivered as text", self.name)
        if not self.broken:
            self.broken = True
            self._report(self.name)
        if self._strict:
            raise EngineError(f"{self.name} does not come back (plugin_strict makes it fatal)")

    def _opened(self) -> StreamParser:
        if self._parser is None:
            self._parser = self._build()
        return self._parser

    def _guarded(self, method: str, call: Callable[[], list[Delta]]) -> list[Delta]:
        began = perf_counter()
        self._calling = method, began
        try:
            deltas = checked(call())
        except BaseException as error:  # a plugin may raise anything, a panic too
            self._tally.failed(self._plugin, method, began)
            log.warning("%s failed; its output is delivered as text", self.name, exc_info=error)
            if not self.broken:  # nor given up meanwhile
                self.broken = True
                self._report(self.name)
            self._end(error)
            return [TextDelta(self.pending)] if self.pending else []
        finally:
            self._calling = None
        self._tally.done(self._plugin, method, began)
        self._keep(deltas)
        return deltas

    def _end(self, error: BaseException) -> None:
        """In strict mode, the end of the request."""
        if self._strict:
            text = f"{self.name} failed: {type(error).__name__}: {error}"
            raise EngineError(f"{text} (plugin_strict makes it fatal)") from error

    def _keep(self, deltas: list[Delta]) -> None:
        """Forget the pending text that ``deltas`` answer for."""
        if not deltas:
            return
        if all(isinstance(d, TextDelta) for d in deltas):
            said = "".join(d.text for d in deltas if isinstance(d, TextDelta))
            if self.pending.startswith(said):
                self.pending = self.pending[len(said) :]
                return
        self.pending = ""


class Splitter:
    """The parsers of one output, behind the ``sieve`` of special tokens if there is one.

    ``most_calls`` drops the calls of a response beyond it.
    """

    def __init__(
        self,
        reasoning: Guard | None,
        tools: Guard | None,
        most_calls: int | None = None,
        sieve: Sieve | None = None,
    ) -> None:
        self._sieve = sieve
        self._reasoning = reasoning
        self._tools = tools
        self._most = most_calls
        self.ids: dict[int, str] = {}
        """The id of each call, by its index."""

    @property
    def pending(self) -> str:
        """What went in and has not come out in any form."""
        guards = (g.pending for g in (self._tools, self._reasoning) if g is not None)
        return "".join(guards) + (self._sieve.carry if self._sieve is not None else "")

    @property
    def failed(self) -> list[str]:
        """The parsers that have raised, as ``kind=name``."""
        return [g.name for g in (self._reasoning, self._tools) if g is not None and g.broken]

    def give_up(self) -> None:
        """The parser that is being called does not come back; with none, none is called."""
        guards = [g for g in (self._reasoning, self._tools) if g is not None]
        for guard in [g for g in guards if g.called] or guards:
            guard.give_up()

    def _call_id(self) -> str:
        made = None if self._tools is None else self._tools.call_id()
        return made or f"call_{secrets.token_hex(12)}"

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        if self._sieve is not None:
            text = self._sieve.feed(text, ids)
        return self._filter(self._through(text, ids))

    def finish(self) -> list[Delta]:
        """The output has ended: what the parsers held back."""
        rest = "" if self._sieve is None else self._sieve.finish()
        found: list[Delta] = self._through(rest, ()) if rest else []
        if self._reasoning is not None:
            for delta in self._reasoning.finish():
                found += self._onwards(delta, ())
        if self._tools is not None:
            found += self._tools.finish()
        return self._filter(found)

    def take(self, text: str, ids: Sequence[int], last: bool) -> list[Delta]:
        """``feed``, and ``finish`` after the last piece."""
        deltas = self.feed(text, ids)
        return deltas + self.finish() if last else deltas

    def _through(self, text: str, ids: Sequence[int]) -> list[Delta]:
        if self._reasoning is None:
            return self._onwards(TextDelta(text), ids)
        deltas = self._reasoning.feed(text, ids)
        # The ids belong to the whole piece: a parser that gets a part of it gets none.
        whole = len(deltas) == 1 and isinstance(deltas[0], TextDelta) and deltas[0].text == text
        found: list[Delta] = []
        for delta in deltas:
            found += self._onwards(delta, ids if whole else ())
        return found

    def _onwards(self, delta: Delta, ids: Sequence[int]) -> list[Delta]:
        if isinstance(delta, TextDelta) and self._tools is not None:
            return self._tools.feed(delta.text, ids)
        return [delta]

    def _filter(self, deltas: list[Delta]) -> list[Delta]:
        kept: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ToolCallDelta):
                if self._most is not None and delta.index >= self._most:
                    continue
                if delta.index not in self.ids:
                    self.ids[delta.index] = self._call_id()
                kept.append(delta)
            elif delta.text:
                kept.append(delta)
        return kept


class WatchedSplitter:
    """A splitter in a thread of ``watch``. After a call that does not come back, text is text."""

    def __init__(self, splitter: Splitter, watch: Watch) -> None:
        self._splitter, self._watch = splitter, watch
        self._given_up = False
        self.ids = splitter.ids
        """The id of each call, by its index."""

    @property
    def failed(self) -> list[str]:
        """The parsers that have raised or hang, as ``kind=name``."""
        return self._splitter.failed

    @property
    def called(self) -> bool:
        return bool(self.ids)

    async def split(self, text: str, ids: Sequence[int], *, last: bool) -> list[Delta]:
        """What a piece of the output says; the ``last`` one, with all that was held back."""
        splitter = self._splitter
        raw = text if self._given_up else splitter.pending + text
        if not self._given_up:
            try:
                return await self._watch.run(lambda: splitter.take(text, ids, last))
            except TimeoutError:
                self._given_up = True
                self.ids = dict(self.ids)  # the thread may still come back
                splitter.give_up()
        return [TextDelta(raw)] if raw else []
