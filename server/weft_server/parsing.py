"""Output parsers, guarded: a parser that raises costs its own work, never the answer.

One ``Splitter`` stands between the text of one output and the wire. It feeds the reasoning parser,
what that leaves to the tool parser, and returns deltas. Streamed or not is the same code: the whole
text is one feed.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence

from weft.api.parsers import (
    CallIds,
    Delta,
    ReasoningDelta,
    StreamParser,
    TextDelta,
    ToolCallDelta,
)
from weft_server.markers import Sieve

__all__ = ("Guard", "Splitter")

log = logging.getLogger("weft.server")

Report = Callable[[str], None]


class Guard:
    """One parser and the text that it has not answered for yet.

    ``build`` makes the parser; it may raise like the parser itself. After the first exception the parser is not called again, and everything that it had taken
    without saying anything about it comes out as text.
    """

    def __init__(self, name: str, build: Callable[[], StreamParser], report: Report) -> None:
        self.name = name
        self.broken = False
        self._report = report
        self._pending = ""
        try:
            self._parser = build()
        except Exception as error:  # a plugin may raise anything
            self._break(error)

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        if self.broken:
            return [TextDelta(text)] if text else []
        self._pending += text
        return self._guarded(lambda: self._parser.feed(text, ids))

    def finish(self) -> list[Delta]:
        return [] if self.broken else self._guarded(self._parser.finish)

    def call_id(self) -> str | None:
        """An id of the parser's own making, if its format asks for one."""
        if self.broken or not isinstance(self._parser, CallIds):
            return None
        try:
            made = self._parser.call_id()
            if 0 < len(made) <= 64 and made.isprintable():
                return made
            raise ValueError(f"a parser made the id {made!r:.80}")
        except Exception as error:  # a plugin may raise anything
            log.warning("%s cannot make ids", self.name, exc_info=error)
            return None

    def _guarded(self, call: Callable[[], list[Delta]]) -> list[Delta]:
        try:
            deltas = list(call())
            for delta in deltas:
                if not isinstance(delta, TextDelta | ReasoningDelta | ToolCallDelta):
                    raise TypeError(f"a parser returned {type(delta).__name__}, not a delta")
        except Exception as error:  # a plugin may raise anything
            self._break(error)
            return [TextDelta(self._pending)] if self._pending else []
        self._keep(deltas)
        return deltas

    def _break(self, error: Exception) -> None:
        log.warning("%s failed; its output is delivered as text", self.name, exc_info=error)
        self.broken = True
        self._report(self.name)

    def _keep(self, deltas: list[Delta]) -> None:
        """Forget the pending text that ``deltas`` answer for."""
        if not deltas:
            return
        if all(isinstance(d, TextDelta) for d in deltas):
            said = "".join(d.text for d in deltas if isinstance(d, TextDelta))
            if self._pending.startswith(said):
                self._pending = self._pending[len(said) :]
                return
        self._pending = ""


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
        self.called = False

    @property
    def failed(self) -> list[str]:
        """The parsers that have raised, as ``kind=name``."""
        return [g.name for g in (self._reasoning, self._tools) if g is not None and g.broken]

    def call_id(self) -> str:
        """An id for a call."""
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
                self.called = True
                kept.append(delta)
            elif delta.text:
                kept.append(delta)
        return kept
